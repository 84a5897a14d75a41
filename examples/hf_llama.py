"""Muon on a Hugging Face Llama under FSDP2: three lines, on CPU or GPU, nothing to download.

torchrun --nproc-per-node 2 examples/hf_llama.py --steps 60 --checkpoint outputs/hf_llama
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon  # 1 of 3


def build_model() -> LlamaForCausalLM:
    """A Llama of 476,032 parameters; `LlamaForCausalLM.from_pretrained(...)` goes here in earnest."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def batch(step: int, rank: int, size: int = 16, length: int = 33, vocab_size: int = 128) -> torch.Tensor:
    """Tokens [size, length], each of which says what the next one is. Each rank has its own."""
    generator = torch.Generator().manual_seed(1 + 1000 * step + rank)
    tokens = [torch.randint(vocab_size, (size,), generator=generator)]
    while len(tokens) < length:
        tokens.append((5 * tokens[-1] + 3) % vocab_size)
    return torch.stack(tokens, dim=1)


def train(device_type: str, num_steps: int, lr: float, checkpoint: str | None) -> None:
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    with torch.device(device_type):
        model = build_model()

    plan = dmuon.dedicate_params(model, mesh)  # 2 of 3: before fully_shard
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=lr)  # 3 of 3: Muon on the matrices of the layers, AdamW on everything else

    if dist.get_rank() == 0:
        print(plan)
    for step in range(1, num_steps + 1):
        tokens = batch(step, dist.get_rank()).to(device_type)
        loss = model(input_ids=tokens, labels=tokens).loss
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
    parser.add_argument("--steps", type=int, default=60)
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
