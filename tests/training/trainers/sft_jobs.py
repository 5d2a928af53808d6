"""What each rank does in the tests of `ParallelSFTTrainer`."""

from __future__ import annotations

from typing import Any

import torch

from parallelize import build_mesh
from parallelize.training.apply_axes import parallelize_model
from parallelize.training.trainers.sft import ParallelSFTTrainer
from tests.support.models import tiny_model
from tests.training.trainers import trainer_jobs as jobs

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=split, **names)


def texts(count: int) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 26, (5 + index % 9,), generator=generator).tolist() for index in range(count)]
    return [" ".join(LETTERS[number] for number in numbers) for numbers in drawn]


def run_sft(
    rank: int,
    folder: str,
    axes: dict[str, int] | None,
    options: dict[str, Any] | None = None,
    family: str = "llama",
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """SFT on a mesh, or, without axes, TRL's SFTTrainer on one process: the reference."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    class OnMesh(ParallelSFTTrainer, SFTTrainer):
        pass

    disable_progress_bars()
    quiet = dict(logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", log_level="error")
    training = dict(
        max_steps=4, learning_rate=1e-2, seed=3, bf16=False, max_length=32, train_sampling_strategy="sequential"
    )
    data = dict(
        train_dataset=Dataset.from_dict({"text": texts(40)}), eval_dataset=Dataset.from_dict({"text": texts(13)})
    )
    with jobs.launched(None if axes else 1):
        model = tiny_model(family, torch.float64, **(config or {}))
        arguments = SFTConfig(folder, **{**quiet, **training, "per_device_train_batch_size": jobs.BATCH, **settings})
        data["processing_class"] = tokenizer()
        if axes:
            parallel = parallelize_model(model, build_mesh("cpu", **axes), **(options or {}))
            trainer: Any = OnMesh(parallel, arguments, global_batch_size=jobs.BATCH, **data)
        else:
            trainer = SFTTrainer(model, arguments, **data)
        trainer.train()
        logged = jobs.outcome(trainer)
        return {name: logged[name] for name in ("loss", "grad_norm", "learning_rate", "last eval_loss")}
