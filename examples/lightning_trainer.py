"""Lightning's Trainer with its ModelParallelStrategy: `configure_model` is where the model is put on the mesh.

torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
torchrun --standalone --nproc-per-node 4 examples/lightning_trainer.py 2 2     # dp, tp
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from text import SIZES, VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from parallelize import GlobalBatches, build_mesh, build_optimizer, clip_grad_norm_, destroy_groups, parallelize_model

dp, tp = map(int, sys.argv[1:] or (2, 1))


class Tuned(LightningModule):
    def configure_model(self) -> None:
        """Lightning's mesh has the same ranks in the same order, under names of its own."""
        self.mesh = build_mesh("cpu", dp=dp, tp=tp)
        set_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
        self.model = parallelize_model(model, self.mesh, zero=2).module

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, torch.optim.AdamW, lr=3e-3)

    def configure_gradient_clipping(self, *_: object, **__: object) -> None:
        clip_grad_norm_(self.model, 1.0)

    def train_dataloader(self) -> DataLoader:
        data = rows()
        return DataLoader(data, batch_sampler=GlobalBatches(len(data), 16, mesh=self.mesh))

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss  # this data rank's part of the mean over all of them
        if (index + 1) % 10 == 0:
            total = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum") / tp
            self.print(f"step {index + 1}  loss {total:.4f}")
        return loss


trainer = Trainer(
    accelerator="cpu",
    devices=dp * tp,
    strategy=ModelParallelStrategy(data_parallel_size=dp, tensor_parallel_size=tp),
    max_steps=20,
    use_distributed_sampler=False,  # GlobalBatches has divided the samples
    enable_checkpointing=False,  # a Checkpointer(folder, model, optimizer=...) saves shards that load on any mesh
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Tuned())
destroy_groups()
