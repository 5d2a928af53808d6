"""The Trainer of `transformers` on a mesh. Three lines are added to a script for one process, and marked.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
torchrun --standalone --nproc-per-node 4 examples/hf_trainer.py dp=2,tp=2
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py pp=2 resume     # the same run, on another mesh
"""

import sys

from text import SIZES, VOCABULARY, rows
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from parallelize import ParallelTrainer, build_mesh, destroy_groups, parallelize_model

MESH = sys.argv[1] if sys.argv[1:] else "dp=2"
axes = {name: int(size) for name, size in (axis.split("=") for axis in MESH.split(","))}


class MyTrainer(ParallelTrainer, Trainer):  # added, with an empty body
    pass


set_seed(0)  # the same weights on every rank; or from_pretrained
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
parallel = parallelize_model(model, build_mesh("cpu", **axes), zero=2 if "dp" in axes else 0)  # added
data = rows()
arguments = TrainingArguments(
    "runs/hf_trainer",
    max_steps=40,
    learning_rate=3e-3,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=20,
    save_steps=20,
    load_best_model_at_end=True,
    dataloader_drop_last=True,  # the last samples of an epoch may not divide over the data ranks
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
trainer = MyTrainer(
    parallel,
    arguments,
    train_dataset=data[:-64],
    eval_dataset=data[-64:],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    global_batch_size=16,  # added: so that every mesh takes the same steps
)
trainer.train(resume_from_checkpoint="resume" in sys.argv[2:])
trainer.save_model("runs/hf_trainer/final")  # every rank calls it, and writes its part
destroy_groups()
