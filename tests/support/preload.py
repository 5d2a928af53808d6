"""What every rank of a test imports: loaded once, in the server that ranks are forked from. No op runs here, so no
thread starts."""

from __future__ import annotations

import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers
from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM

import parallelize

__all__ = ["BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "torch", "transformers"]

for _name in parallelize.__all__:
    getattr(parallelize, _name)
