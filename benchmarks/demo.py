"""Train a stock `transformers` Llama with tensor, sequence and loss parallelism, and check it against one process.

    torchrun --standalone --nproc-per-node 2 benchmarks/demo.py          # CPU
    torchrun --nproc-per-node 8 benchmarks/demo.py --device cuda         # GPUs of one node

Copy this file to start your own: all that makes it parallel is `build_mesh` and `parallelize_module`.
"""

import argparse
import copy
import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import parallelize
from parallelize import build_mesh, cross_entropy, destroy_groups, full_gradients, full_parameter, parallelize_module

CONTEXT, BATCH = 256, 4
ROUNDING = {"loss": 1e-5, "gradients": 1e-5, "weights": 1e-5}  # float32, sums in another order


def english_text() -> torch.Tensor:
    """Python's own documentation topics, as bytes: real text that is on every machine."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, next ids) [BATCH, CONTEXT], the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def train(model, text, steps: int, device: str, report) -> tuple[list[float], dict]:
    """(the loss of every step, the gradients of the first)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    losses, first_gradients, began = [], {}, time.perf_counter()
    for step in range(steps):
        ids, labels = (tensor.to(device) for tensor in batch(text, step))
        loss = cross_entropy(model(input_ids=ids, use_cache=False).logits, labels)
        loss.backward()
        if step == 0:
            first_gradients = gradients_of(model)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        report(step, losses[-1], BATCH * CONTEXT * (step + 1) / (time.perf_counter() - began))
    return losses, first_gradients


def gradients_of(model) -> dict[str, torch.Tensor]:
    planned = "_applied" in vars(model)
    return full_gradients(model) if planned else {n: p.grad.clone() for n, p in model.named_parameters()}


def relative(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference over the largest value, a tensor at a time (floored at a thousandth of the largest
    tensor's)."""
    floor = 1e-3 * max(float(b.abs().max()) for b in expected.values())
    return max(float((actual[n] - b).abs().max()) / max(float(b.abs().max()), floor) for n, b in expected.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaForCausalLM(config).to(device)
    reference = copy.deepcopy(model) if rank == 0 else None

    mesh = build_mesh(device, tp=world)
    parallelize_module(model, mesh, "llama", sequence_parallel=True, loss_parallel=True)

    def show(step: int, loss: float, speed: float) -> None:
        if rank == 0 and (step % 5 == 0 or step == options.steps - 1):
            print(f"step {step:3d}  loss {loss:.4f}  {speed:7.0f} tokens/s", flush=True)

    text = english_text()
    if rank == 0:
        count = sum(p.numel() for p in reference.parameters())
        print(
            f"Llama with {count:,} parameters, {len(text):,} bytes of text, {world} processes on {device}", flush=True
        )
    losses, gradients = train(model, text, options.steps, device, show)
    weights = {name: full_parameter(model, name).detach() for name, _ in model.named_parameters()}
    if rank == 0:
        print("\n" + parallelize.describe_plan(model) + "\n\nthe same batches without parallelism:", flush=True)
        ok = compare(losses, gradients, weights, *train(reference, text, options.steps, device, show), reference)
        if device == "cpu":
            print("\non GPUs: torchrun --nproc-per-node 8 benchmarks/demo.py --device cuda")
    verdict = torch.tensor([1 if rank or ok else 0], device=device)
    dist.broadcast(verdict, 0)
    destroy_groups()
    sys.exit(0 if verdict.item() else 1)


def compare(losses, gradients, weights, want_losses, want_gradients, reference) -> bool:
    """Print the largest relative differences; False if one is larger than rounding."""
    differences = {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, want_losses, strict=True)),
        "gradients": relative(gradients, want_gradients),
        "weights": relative(weights, {name: p.detach() for name, p in reference.named_parameters()}),
    }
    when = {
        "loss": "over the run",
        "gradients": "at the first step",
        "weights": f"after {len(losses)} steps",
    }
    print("\nlargest relative difference from the unsharded model")
    for name, value in differences.items():
        mark = "ok" if value <= ROUNDING[name] else "DIFFERS"
        print(f"  {name:<10} {when[name]:<18} {value:.1e}  (at most {ROUNDING[name]:.0e})  {mark}", flush=True)
    return all(value <= ROUNDING[name] for name, value in differences.items())


if __name__ == "__main__":
    main()
