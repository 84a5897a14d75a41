"""Muon on a plain nn.Module under FSDP2: three lines, on CPU or GPU.

torchrun --nproc-per-node 2 examples/plain_module.py --steps 100 --checkpoint outputs/plain_module
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon  # 1 of 3

NUM_FEATURES, NUM_CLASSES = 64, 16


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A residual network. Its matrices lie in `blocks.N`, where dmuon looks for them."""

    def __init__(self, dim: int = 128, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(NUM_FEATURES, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(num_blocks)))
        self.head = nn.Linear(dim, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


def batch(step: int, rank: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Random points, labelled by a fixed random map. Each rank has its own."""
    teacher = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=torch.Generator().manual_seed(0))
    points = torch.randn(size, NUM_FEATURES, generator=torch.Generator().manual_seed(1 + 1000 * step + rank))
    return points, (points @ teacher).argmax(dim=-1)


def train(device_type: str, num_steps: int, lr: float, checkpoint: str | None) -> None:
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = Classifier().to(device_type)

    plan = dmuon.dedicate_params(model, mesh)  # 2 of 3: before fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=lr)  # 3 of 3: Muon on the matrices of the blocks, AdamW on everything else

    if dist.get_rank() == 0:
        print(plan)
    for step in range(1, num_steps + 1):
        points, labels = (tensor.to(device_type) for tensor in batch(step, dist.get_rank()))
        loss = F.cross_entropy(model(points), labels)
        loss.backward()
        norm = dmuon.clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}  loss {loss.item():.4f}  grad_norm {norm.item():.4f}", flush=True)
    if checkpoint:
        dcp.save(dmuon.get_state_dict(model, optimizer), checkpoint_id=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint", help="folder to save the trained model and the optimizer in")
    args = parser.parse_args()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(device_type, args.steps, args.lr, args.checkpoint)
    # The model and its meshes are gone by now: only then is the end of the process groups clean.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
