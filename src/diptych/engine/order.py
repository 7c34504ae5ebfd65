"""A request made ready: held against the checkpoint, its image read, its seed drawn; no weight is touched yet."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image

from diptych.errors import RequestError
from diptych.media.images import fit_image, load_image
from diptych.request import ClipDefaults, ClipRequest, ResolvedRequest
from diptych.sampling.caches import CachePlan


@dataclass(frozen=True)
class Order:
    """resolved: every field filled, the seed too; image: RGB, of the clip's size, or None; cache: None is exact."""

    resolved: ResolvedRequest
    image: Image | None
    cache: CachePlan | None = None

    @property
    def request(self) -> ClipRequest:
        return self.resolved.request

    @property
    def seed(self) -> int:
        assert self.request.seed is not None
        return self.request.seed


def take(request: ClipRequest, defaults: ClipDefaults, cache: CachePlan | None = None) -> Order:
    """Make one request ready.

    Raises `RequestError` for what the checkpoint cannot do, also for what its cache would have to know and does not,
    and `MediaError` for an image that cannot be read.
    """
    if not isinstance(request, ClipRequest):
        raise RequestError("request", request, "a ClipRequest; ClipRequest.from_dict makes one of a dict")
    resolved = request.resolve(defaults)
    if cache is not None:
        cache.check(resolved)
    image = None
    if request.image is not None:
        image = fit_image(load_image(request.image), resolved.width, resolved.height, request.fit)
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    return Order(replace(resolved, request=replace(resolved.request, seed=seed)), image, cache)


def take_batch(requests: Sequence[ClipRequest], defaults: ClipDefaults, cache: CachePlan | None = None) -> list[Order]:
    """Make requests ready that are to be denoised together.

    Raises `RequestError` also when they differ in more than prompt, negative, image and seed.
    """
    if not requests:
        raise RequestError("requests", [], "at least one")
    orders = [take(request, defaults, cache) for request in requests]
    first = orders[0].resolved.key()
    for number, order in enumerate(orders[1:], start=2):
        if order.resolved.key() != first:
            names = [a[0] for a, b in zip(first[:-1], order.resolved.key()[:-1], strict=True) if a != b]
            name = names[0] if names else "image"
            raise RequestError(
                f"request {number}: {name}",
                getattr(order.request, name) if names else order.image is not None,
                "requests of one batch agree in everything but prompt, negative, seed and picture",
            )
    return orders
