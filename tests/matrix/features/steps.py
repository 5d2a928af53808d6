"""Steps of `parallel.step`: what they are given, and how often."""

from __future__ import annotations

import torch
from torch import nn

from parallelize import PackedRows
from parallelize.tools.verification.precision import InFloat64
from tests.matrix.feature import feature
from tests.matrix.kinds import IGNORED, LENGTH, ROWS, summed_loss
from tests.matrix.sides import Side


@feature()
def targets(side: Side) -> None:
    side.place()
    side.train()


@feature()
def labels(side: Side) -> None:
    """As the stock model takes them: causal models shift them."""
    side.place()
    side.step(0, labels=side.local(side.kind.labels(0)))
    side.update()
    side.step(1, labels=side.local(side.kind.labels(1)))


def packed_positions(rows: int = ROWS) -> torch.Tensor:
    """Two documents a row, of which the second begins elsewhere in each row."""
    starts = 3 + torch.arange(rows) % 5
    positions = torch.arange(LENGTH).expand(rows, -1).clone()
    return torch.where(positions >= starts[:, None], positions - starts[:, None], positions)


@feature(needs={"causal", "stock"}, without={"recurrent"})
def packed(side: Side) -> None:
    side.place()
    side.step(0, position_ids=side.local(packed_positions()))
    side.update()
    side.step(1, position_ids=packed_positions(1))  # one row for all
    side.evaluate(2, position_ids=side.local(packed_positions()))


@feature(needs={"causal", "stock"}, without={"recurrent"})
def packed_rows(side: Side) -> None:
    """Documents of a data set in rows, by the package's own batches."""
    side.place()
    tokens = 3 + torch.randint(60, (ROWS * LENGTH + 1,), generator=torch.Generator().manual_seed(9))
    rows = PackedRows(tokens, LENGTH, starts=[0, 7, 20, 31, 36, 50, 62, 75, 88])
    batch = torch.utils.data.default_collate([rows[index] for index in range(ROWS)])
    targets = batch.pop("targets")
    side.step(0, **side.local(batch), targets=side.local(targets))


@feature(needs={"text", "stock"})
def right_padding(side: Side) -> None:
    side.place()
    side.step(0, **_padded(side, right=True))


@feature(needs={"causal", "stock"}, without={"recurrent"})
def left_padding(side: Side) -> None:
    side.place()
    side.step(0, **_padded(side, right=False))


def _padded(side: Side, right: bool) -> dict[str, torch.Tensor]:
    inputs, targets = side.kind.batch(0)
    lengths = LENGTH - torch.arange(ROWS) % 4
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    mask = positions < lengths[:, None] if right else positions >= LENGTH - lengths[:, None]
    ids = torch.where(mask, inputs["input_ids"], 0)
    targets = torch.where(mask, targets, IGNORED)
    return side.local({"input_ids": ids, "attention_mask": mask.long(), "targets": targets})


def _rows_without_targets(side: Side) -> None:
    """All rows but the last have none, so that data ranks and microbatches are empty."""
    targets = side.kind.batch(0)[1].clone()
    targets[:-1] = IGNORED
    side.step(0, targets=side.local(targets))


def _batch_without_targets(side: Side) -> None:
    """Its loss is NaN, as PyTorch's mean of nothing, and it adds nothing to the gradients."""
    side.step(0)
    side.step(0, targets=side.local(torch.full_like(side.kind.batch(0)[1], IGNORED)))
    loss = side.records.pop(list(side.records)[-1])
    side.record("no loss", float(side.alone or loss.isnan()))


@feature(needs={"text"})
def rows_without_targets(side: Side) -> None:
    side.place()
    _rows_without_targets(side)


@feature(needs={"text"})
def batch_without_targets(side: Side) -> None:
    side.place()
    _batch_without_targets(side)


@feature(needs={"text"})
def fused_loss_without_targets(side: Side) -> None:
    side.place(fuse_loss=True, num_microbatches=2)
    _rows_without_targets(side)
    _batch_without_targets(side)


@feature(needs={"text"})
def own_loss_without_targets(side: Side) -> None:
    side.place(loss=_squared_margin, count=lambda targets: (targets != IGNORED).sum(), num_microbatches=2)
    _rows_without_targets(side)
    _batch_without_targets(side)


@feature(needs={"text", "causal"})
def other_lengths(side: Side) -> None:
    """The second step has shorter sequences, of a length that no mesh divides."""
    side.place()
    side.step(0)
    side.update()
    inputs, targets = side.kind.batch(1)
    side.step(1, input_ids=side.local(inputs["input_ids"][:, :7]), targets=side.local(targets[:, :7]))


@feature(needs={"text", "causal"}, on=lambda axis: axis.ranks("cp") < 4)
def as_many_tokens_as_ranks(side: Side) -> None:
    """A dim of one token on a rank is told from one of features."""
    side.place()
    inputs, targets = side.kind.batch(0)
    for length in (2, 4):
        ids = side.local(inputs["input_ids"][:, -length:])
        side.step(0, input_ids=ids, targets=side.local(targets[:, -length:]))


class _Scaled(nn.Module):
    """A model that takes a list with an entry for each sequence."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, scales: list[float]) -> torch.Tensor:
        return self.model(input_ids) * torch.tensor(scales, dtype=torch.float64)[:, None, None]


@feature(needs={"own"}, prepare=_Scaled, on=lambda axis: axis.sizes.keys() == {"dp"} and "ep" not in axis.options)
def lists(side: Side) -> None:
    """A list of which `whole` says that it has an entry for each sequence."""
    side.place(plan=None, num_microbatches=2, whole={"scales": False})
    side.step(0, scales=side.local([1.0 + row for row in range(ROWS)]))


@feature(needs={"causal", "stock"})
def embedded_inputs(side: Side) -> None:
    side.place()
    generator = torch.Generator().manual_seed(5)
    width = side.model.config.hidden_size
    embeds = torch.randn(ROWS, LENGTH, width, generator=generator, dtype=torch.float64)
    side.step(0, input_ids=None, inputs_embeds=side.local(embeds))


@feature()
def more_microbatches(side: Side) -> None:
    """Each of one row on four data ranks at most."""
    side.place(num_microbatches=2)
    side.train()


@feature()
def accumulated_steps(side: Side) -> None:
    """Two steps before an update: gradients add up."""
    side.place()
    side.step(0)
    side.step(1)
    side.update()
    side.step(0)


@feature(on=lambda axis: axis.options.get("zero", 0) >= 2)
def deferred_reduction(side: Side) -> None:
    side.place(defer=True, **({} if side.alone or "pp" in side.axis.sizes else {"num_microbatches": 2}))
    side.step(0)
    side.step(1)
    side.update()
    side.step(0)


@feature()
def evaluation_between(side: Side) -> None:
    side.place()
    side.step(0)
    side.model.eval()
    side.evaluate(1)
    side.model.train()
    side.update()
    side.step(1)


@feature(needs={"text"})
def own_loss(side: Side) -> None:
    """A loss of the user's: the sum over a microbatch, and what it is divided by."""
    side.place(loss=_squared_margin, count=lambda targets: targets.numel())
    side.train()


def _squared_margin(output: object, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((chosen - 1).square() * (targets != IGNORED)).sum()


@feature(
    needs={"experts"},
    overrides={"": {"output_router_logits": True, "router_aux_loss_coef": 0.5}},
    on=lambda axis: not axis.deep,
)
def router_loss(side: Side) -> None:
    """The balance loss of a mixture, without padding and with it; each microbatch of a pipeline has one of its own."""
    side.place(**({} if side.alone or "pp" not in side.axis.sizes else {"num_microbatches": 1}))
    for inputs in ({**side.inputs(), "targets": side.targets()}, _padded(side, right=True)):
        with InFloat64():
            if side.alone:
                targets = inputs.pop("targets")
                output = side.model(**inputs, use_cache=False)
                loss = summed_loss(output, targets) / (targets != IGNORED).sum() + 0.5 * output.aux_loss
                loss.backward()
                side.record("loss", loss)
            else:
                side.step(0, **inputs)
