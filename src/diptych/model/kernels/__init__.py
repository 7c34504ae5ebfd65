"""Fused Triton kernels of the transformer's element-wise work; `diptych.model.ops` says when they run."""
