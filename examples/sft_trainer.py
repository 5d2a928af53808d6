"""TRL's SFTTrainer on a mesh, with packed rows: as examples/hf_trainer.py, with another mixin.

torchrun --standalone --nproc-per-node 2 examples/sft_trainer.py
"""

import argparse
import sys
from pathlib import Path

from datasets import Dataset
from text import SIZES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from parallelize import ParallelSFTTrainer, build_mesh, destroy_groups, parallelize_model

MESH = sys.argv[1] if sys.argv[1:] else "tp=2"
axes = {name: int(size) for name, size in (axis.split("=") for axis in MESH.split(","))}


class MyTrainer(ParallelSFTTrainer, SFTTrainer):
    pass


lines = [line for line in Path(argparse.__file__).read_text().splitlines() if line.strip()]
words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *sorted({*"".join(lines)})])}
split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
split.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # into characters
tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", bos_token="<s>", eos_token="</s>")

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **SIZES))
parallel = parallelize_model(model, build_mesh("cpu", **axes), loss_parallel=True)
arguments = SFTConfig(
    "runs/sft_trainer",
    max_steps=20,
    learning_rate=3e-3,
    dataloader_drop_last=True,  # the last samples of an epoch may not divide over the data ranks
    logging_steps=10,
    packing=True,  # several lines a row, kept apart by position_ids
    max_length=128,
    save_strategy="no",
    bf16=False,
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
data = Dataset.from_dict({"text": lines})
trainer = MyTrainer(parallel, arguments, train_dataset=data, processing_class=tokenizer, global_batch_size=8)
trainer.train()
destroy_groups()
