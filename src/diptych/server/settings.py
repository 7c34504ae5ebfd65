"""Every setting of `diptych serve` in one typed model: flag, environment variable and YAML key are the same name."""

from __future__ import annotations

import argparse
import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import yaml
from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from diptych.errors import RequestError, UserError
from diptych.memory.precision import Precision
from diptych.parallel.layout import Layout
from diptych.planner.options import check_offload, pick_bytes
from diptych.server.shape import warm_up_shape

Names = Annotated[list[str], NoDecode]


class SettingsError(UserError):
    """A setting that cannot be honoured."""


class Key(BaseModel):
    """Who may call: `name` labels metrics and owns jobs, higher `priority` is served first, `admin` sees all jobs."""

    name: str
    secret: SecretStr
    priority: int = 0
    admin: bool = False


class Settings(BaseSettings):
    """Flags are `--kebab-case`, variables `DIPTYCH_UPPER_CASE`, YAML keys `snake_case`; flags win, then variables."""

    model_config = SettingsConfigDict(
        env_prefix="DIPTYCH_",
        extra="forbid",
    )

    checkpoint: str = Field("demo", description="folder, hub id or name; default: the small model in the package")
    config: Path | None = Field(None, description="YAML file with any of these settings")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    insecure: bool = Field(False, description="allow an address that others reach without any API key")
    root_path: str = Field("", description="path prefix under which a reverse proxy shows the server")
    forwarded_allow_ips: str = Field("127.0.0.1", description="proxies whose X-Forwarded-* headers are believed")
    allowed_host: Names = Field([], description="host names accepted on a loopback address without keys (repeatable)")
    api_key: Annotated[list[SecretStr], NoDecode] = Field(
        [], description="KEY or name=KEY or name:priority=KEY; repeatable; guards /v1"
    )
    api_key_file: Path | None = Field(None, description="file with one API key a line, same form")
    admin_key: SecretStr | None = Field(None, description="key that sees the jobs of all keys")

    state_dir: Path = Field(
        Path(os.environ.get("XDG_STATE_HOME", "~/.local/state")) / "diptych",
        description="jobs and their files",
    )
    database: str = Field("", description="postgresql://... for several API hosts; empty: SQLite in the state dir")
    ttl: float = Field(86_400, ge=0, description="seconds a finished job is kept; 0 keeps it")
    sweep_every: float = Field(60, gt=0, description="seconds between removals of what has expired")
    min_free_mib: int = Field(512, ge=0, description="refuse new jobs below this much free disk")
    max_store_gib: float = Field(0, ge=0, description="refuse new jobs above this much stored; 0: no limit")

    layout: Names = Field([], description="auto, or a layout such as cfg=2,ulysses=4; repeat it for each replica")
    device: str | None = Field(None, description="device of the engine, such as cuda or cpu")
    dtype: str | None = Field(None, description="working precision of the engine")
    precision: str = Field(
        "exact", description="exact; or fp8, fp8:N, fp8:steps=N,first=N,last=N: an approximation that every clip names"
    )
    text_precision: Literal["exact", "8bit", "nf4"] = Field(
        "exact", description="exact; or 8bit, nf4: the language model in fewer bits, which every clip names"
    )
    cache: str = Field("", description="step cache for jobs that ask for quality high, such as magcache")
    modulation: Literal["resident", "tables"] = Field("resident", description="tables needs less GPU memory")
    offload: Literal["none", "model", "block"] | None = Field(
        None, description="what is on the GPU only while it is used: models, or blocks too; default: by memory"
    )
    memory: str | None = Field(None, description="what an engine may take on each GPU, such as 22GiB")
    replicas: int = Field(1, ge=0, le=64, description="engines behind the one queue; 0: API only")
    gpus: str | None = Field(None, description="GPU indices, such as 0,1,2,3, divided evenly among the replicas")
    warm_up: Names = Field([], description="WIDTHxHEIGHTxFRAMES run once before the server is ready (repeatable)")
    load_timeout: float = Field(3600, gt=0, description="seconds an engine may take to load and warm up")
    stall_timeout: float = Field(120, gt=0, description="seconds without a step after which an engine is ended")
    on_restart: Literal["fail", "requeue"] = Field("fail", description="what becomes of a job whose engine ended")
    drain_timeout: float = Field(30, ge=0, description="seconds a running job may still take after SIGTERM")

    served_model_name: Names = Field([], description="names accepted as model (repeatable); default: the checkpoint")
    max_queue: int = Field(32, ge=1, description="waiting jobs")
    max_queue_per_key: int = Field(8, ge=1, description="waiting jobs of one API key")
    queue_timeout: float = Field(0, ge=0, description="seconds a job may wait; 0: no limit")
    max_outputs: int = Field(4, ge=1, le=10, description="clips one job may ask for")
    max_video_tokens: int = Field(200_000, ge=1, description="latent frames x height/16 x width/16 of one clip")
    max_steps: int = Field(200, ge=1, le=1000, description="denoising steps of one clip")
    max_work: int = Field(0, ge=0, description="video tokens x steps x outputs of one job; 0: no limit")
    max_body_mib: int = Field(64, ge=1, description="size of one request")
    max_image_mib: int = Field(30, ge=1, description="size of an uploaded image")
    max_image_megapixels: int = Field(64, ge=1, description="pixels of an uploaded image")
    allowed_media_domains: Names = Field([], description="hosts that an https reference may name (repeatable)")
    cancel_timeout: float = Field(30, gt=0, description="seconds DELETE waits for a running job to stop")
    sync_timeout: float = Field(3600, gt=0, description="seconds /v1/videos/sync waits")
    max_streams_per_key: int = Field(8, ge=1, description="event streams of one API key")
    max_streams: int = Field(512, ge=1, description="event streams of all clients")
    poll_after_ms: int = Field(2000, ge=500, le=5000, description="polling interval told to the openai client")
    preview_every: int = Field(2, ge=0, description="steps between preview pictures; 0: none")

    studio: bool = Field(True, description="show the studio page at /")
    metrics: bool = Field(True, description="show Prometheus metrics at /metrics")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_json: bool = Field(False, description="log one JSON object a line")
    log_prompts: bool = Field(False, description="allow prompts in the log")
    print_config: bool = Field(False, description="print the effective settings as YAML and exit")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = _config_path(init_settings)
        if path is None:
            return init_settings, env_settings
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=path)

    @field_validator(
        "api_key",
        "allowed_host",
        "layout",
        "warm_up",
        "served_model_name",
        "allowed_media_domains",
        mode="before",
    )
    @classmethod
    def _split(cls, value: Any, info: Any) -> Any:
        """A variable holds several values separated by spaces (layouts contain commas, so commas do not separate)."""
        if isinstance(value, SecretStr):
            return [value]
        if isinstance(value, str):
            return value.split()
        return value

    @field_validator("state_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("root_path")
    @classmethod
    def _prefix(cls, value: str) -> str:
        value = value.rstrip("/")
        if value and not value.startswith("/"):
            raise ValueError("starts with /, such as /diptych")
        return value

    @field_validator("precision")
    @classmethod
    def _precision(cls, value: str) -> str:
        try:
            Precision.parse(value)
        except RequestError as error:
            raise ValueError(error.accepted) from None
        return value

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str | None) -> str | None:
        try:
            pick_bytes("memory", value)
        except RequestError as error:
            raise ValueError(error.accepted) from None
        return value

    @field_validator("layout")
    @classmethod
    def _layouts(cls, value: list[str]) -> list[str]:
        for text in value:
            if text != "auto":
                Layout.parse(text)
        return value

    @field_validator("cache")
    @classmethod
    def _cache(cls, value: str) -> str:
        return "" if value.strip() == "none" else value.strip()

    @field_validator("warm_up")
    @classmethod
    def _shapes(cls, value: list[str]) -> list[str]:
        for text in value:
            warm_up_shape(text)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if len(self.layout) > 1 and len(self.layout) != self.replicas:
            raise ValueError(f"layout: give one, or one for each of the {self.replicas} replicas")
        for text in self.layout:
            check_offload(self.offload, None if text == "auto" else Layout.parse(text))
        if self.gpus is not None and self.replicas and len(self.gpu_list()) % self.replicas:
            raise ValueError(f"gpus: {self.gpus} cannot be divided evenly among {self.replicas} replicas")
        if not self.replicas and not self.database:
            raise ValueError("replicas: 0 needs a database that other hosts share")
        keys = self.keys()
        if not _is_loopback(self.host) and not self.insecure and not keys:
            raise ValueError(f"host: {self.host} is reached by others; set an api_key, or insecure if you must")
        return self

    def keys(self) -> list[Key]:
        """All keys, parsed: those given, those in the file, and the admin key."""
        texts = [s.get_secret_value() for s in self.api_key]
        if self.api_key_file is not None:
            lines = self.api_key_file.read_text("utf-8").splitlines()
            texts += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        keys = [_parse_key(text, index) for index, text in enumerate(texts)]
        if self.admin_key is not None:
            keys.append(Key(name="admin", secret=self.admin_key, priority=0, admin=True))
        if len({k.name for k in keys}) != len(keys):
            raise ValueError("api_key: two keys have one name")
        return keys

    def gpu_list(self) -> list[str]:
        return [g.strip() for g in (self.gpus or "").split(",") if g.strip()]

    def replica_gpus(self, index: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of one replica, or None to leave it alone."""
        gpus = self.gpu_list()
        each = len(gpus) // self.replicas
        return ",".join(gpus[index * each : (index + 1) * each]) if gpus else None

    def replica_layout(self, index: int) -> str | None:
        return self.layout[index if len(self.layout) > 1 else 0] if self.layout else None

    def model_names(self) -> list[str]:
        """Names a request may use as `model`; the first one is shown."""
        name = self.checkpoint.rstrip("/")
        shown = name if name.count("/") == 1 and not name.startswith((".", "/", "~")) else Path(name).name
        return list(self.served_model_name) or [shown]

    def accepted_models(self) -> set[str]:
        return {*self.model_names(), self.checkpoint}

    def database_url(self) -> str:
        if self.database:
            return self.database.replace("postgresql://", "postgresql+psycopg://", 1)
        return f"sqlite:///{self.state_dir / 'jobs.db'}"

    def as_yaml(self) -> str:
        """The effective settings; secrets are masked."""
        values = self.model_dump(mode="json", exclude={"print_config", "config"})
        if self.database and "@" in self.database:
            values["database"] = "postgresql://***@" + self.database.rsplit("@", 1)[1]
        text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        return text


def load(arguments: list[str] | None = None, **values: Any) -> Settings:
    """Settings from flags, environment, YAML and defaults. Raises `SettingsError` with one sentence for a bad one."""
    if arguments is not None:
        values |= {k: v for k, v in vars(_parser().parse_args(arguments)).items() if v is not None}
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "settings"
        given = "" if not first["loc"] or "key" in name else f" = {first.get('input')!r}"
        raise SettingsError(f"{name}{given}: {first['msg'].removeprefix('Value error, ')}") from None
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"settings: {error}") from None


class _Parser(argparse.ArgumentParser):
    """Its own way to refuse prints every flag, and the reason below them."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; {self.prog} --help tells what there is.")


def _parser() -> argparse.ArgumentParser:
    """One flag for each setting; lists repeat, switches have a --no- form. Values stay text: the model reads them."""
    parser = _Parser("diptych serve", description="Serve a checkpoint over HTTP, with a studio page.")
    for name, info in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        more: dict[str, Any] = {"help": (info.description or "").replace("%", "%%"), "default": None}
        if name == "checkpoint":
            parser.add_argument(name, nargs="?", metavar="CHECKPOINT", **more)
        elif info.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **more)
        elif isinstance(info.default, list):
            parser.add_argument(flag, action="append", metavar="VALUE", **more)
        else:
            shown = "" if info.default in (None, "") else f" ({info.default})"
            more["help"] += shown
            parser.add_argument(flag, metavar=name.rsplit("_")[-1].upper(), **more)
    return parser


def _config_path(init: PydanticBaseSettingsSource) -> Path | None:
    given = init().get("config") or os.environ.get("DIPTYCH_CONFIG")
    if given is None:
        return None
    path = Path(given)
    if not path.is_file():
        raise FileNotFoundError(f"config: {path} is no file")
    return path


def _parse_key(text: str, index: int) -> Key:
    label, sep, secret = text.partition("=")
    if not sep or not label or not secret or not label.replace("-", "").replace("_", "").replace(":", "").isalnum():
        label, secret = f"key{index + 1}", text
    name, _, priority = label.partition(":")
    if priority and not priority.isdigit():
        raise ValueError(f"api_key: {label} has no whole number as its priority")
    if len(secret) < 8:
        raise ValueError("api_key: a key has at least 8 characters")
    return Key(name=name, secret=SecretStr(secret), priority=int(priority or 0))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
