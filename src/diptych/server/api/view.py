"""How jobs look from outside: the job object of the API, all keys always present."""

from __future__ import annotations

from typing import Any

from diptych.server.store.job import Job


def video(job: Job, queue_position: int | None = None) -> dict[str, Any]:
    """The job object of videos-api, section 5."""
    spec, outcome = job.spec, job.outcome or {}
    duration = spec["num_frames"] / spec["fps"]
    return {
        "id": job.id,
        "object": "video",
        "model": spec["model"],
        "status": job.status,
        "progress": job.progress,
        "created_at": job.created_ms // 1000,
        "completed_at": _seconds(job.completed_ms),
        "expires_at": _seconds(job.expires_ms),
        "prompt": spec["prompt"],
        "remixed_from_video_id": job.remixed_from,
        "seconds": str(max(round(duration), 1)),
        "size": f"{spec['width']}x{spec['height']}",
        "error": job.error,
        "quality": spec["quality"],
        "fps": spec["fps"],
        "num_frames": spec["num_frames"],
        "duration_s": duration,
        "media_type": "video/mp4",
        "file_name": f"{job.id}.mp4",
        "inference_time_s": outcome.get("inference_time_s"),
        "stage_durations": outcome.get("stage_durations"),
        "peak_memory_mb": outcome.get("peak_memory_mb"),
        "metrics": outcome.get("metrics") if spec["return_stage_metrics"] else None,
        "num_outputs": spec["n"],
        "revised_prompt": None,
        "url": None,
        "seed": spec["seeds"][0],
        "num_inference_steps": spec["num_inference_steps"],
        "guidance_scale": spec["guidance_scale"],
        "has_audio": spec["sample_audio"],
        "task": "i2va" if spec["image"] else "t2va",
        **live(job, queue_position),
        "ignored_params": spec["ignored_params"],
        "warnings": [*spec["warnings"], *outcome.get("warnings", [])],
    }


def live(job: Job, queue_position: int | None) -> dict[str, Any]:
    running = job.status == "in_progress"
    return {
        "stage": job.stage if running else None,
        "step": job.step if running else None,
        "total_steps": job.total_steps if running else None,
        "queue_position": queue_position if job.status == "queued" else None,
        "eta_s": round(job.eta_ms / 1000, 1) if running and job.eta_ms is not None else None,
    }


def progress(job: Job, queue_position: int | None) -> dict[str, Any]:
    """The `progress` event."""
    return {"id": job.id, "status": job.status, "progress": job.progress, **live(job, queue_position)}


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
