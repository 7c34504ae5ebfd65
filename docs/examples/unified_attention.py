"""One attention over picture and text on several ranks, for a model of your own:

torchrun --nproc-per-node 2 docs/examples/unified_attention.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from diptych.attention import Joint, Place, Plan, unified_attention


class JointAttention(nn.Module):
    """Picture tokens are split over the ranks; the few text tokens are on every rank, and join in the attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.picture_qkv, self.text_qkv = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, picture_BsD: Tensor, text_BLD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        q, k, v = self.picture_qkv(picture_BsD).unflatten(-1, (3, self.heads, -1)).unbind(2)
        joint = Joint(*self.text_qkv(text_BLD).unflatten(-1, (3, self.heads, -1)).unbind(2), where="rear")
        attended = unified_attention(q, k, v, plan, joint=joint)
        picture, text = attended.out_BsHK.flatten(2), attended.joint_BJHK.flatten(2)
        return picture_BsD + self.out(picture), text_BLD + self.out(text)


@torch.no_grad()
def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("ring", "ulysses"))
    place = Place.from_mesh(mesh)
    torch.manual_seed(0)  # the same weights and input on every rank
    model, picture, text = JointAttention(width=60, heads=5), torch.randn(1, 1001, 60), torch.randn(1, 17, 60)
    plan = Plan.even(place, tokens=1001)
    own = picture[:, plan.span.start : plan.span.stop]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # one graph; this backend needs no compiler
    own, text_out = compiled(own, text, plan)

    whole, whole_text = model(picture, text, Plan(Place(), (1001,)))  # the same on one rank
    error = max((own - whole[:, plan.span.start : plan.span.stop]).abs().max(), (text_out - whole_text).abs().max())
    print(f"rank {place.rank}: tokens {plan.span.start} to {plan.span.stop}, off by {error:.0e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
