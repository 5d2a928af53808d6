"""Steps of `parallel.step`: what they are given, and how often."""

from __future__ import annotations

import torch
from torch import nn

from parallelize import PackedRows
from parallelize.tools.verification.precision import InFloat64
from tests.matrix.feature import at, change, feature
from tests.matrix.features.schedules import twice
from tests.matrix.kinds import IGNORED, LENGTH, ROWS, summed_loss
from tests.matrix.sides import Side
from tests.support import images

T = torch.Tensor
Batch = tuple[dict[str, T], T]

change("targets")  # the loop as it is


@at("step", apart={"labels"})
def labels(side: Side, number: int) -> None:
    """As the stock model takes them: causal models shift them."""
    side.step(number, labels=side.local(side.kind.labels(number)))


def packed_positions(rows: int = ROWS) -> torch.Tensor:
    """Two documents a row, of which the second begins elsewhere in each row."""
    starts = 3 + torch.arange(rows) % 5
    positions = torch.arange(LENGTH).expand(rows, -1).clone()
    return torch.where(positions >= starts[:, None], positions - starts[:, None], positions)


def _llava(model: nn.Module) -> nn.Module:
    return images.build("llava", layers=4)


ROWS_OF_DOCUMENTS = {"needs": {"causal", "stock"}, "without": {"recurrent"}, "apart": {"rows"}}


@at("batch", **ROWS_OF_DOCUMENTS)
def packed(inputs: dict[str, T], targets: T, number: int) -> Batch:
    rows = 1 if number == 1 else ROWS  # one row for all in the second batch
    return {**inputs, "position_ids": packed_positions(rows)}, targets


@at("batch", **ROWS_OF_DOCUMENTS)
def packed_rows(inputs: dict[str, T], targets: T, number: int) -> Batch:
    """Documents of a data set in rows, by the package's own batches."""
    tokens = 3 + torch.randint(60, (ROWS * LENGTH + 1,), generator=torch.Generator().manual_seed(9 + number))
    rows = PackedRows(tokens, LENGTH, starts=[0, 7, 20, 31, 36, 50, 62, 75, 88])
    batch = torch.utils.data.default_collate([rows[index] for index in range(ROWS)])
    return batch, batch.pop("targets")


@at("batch", needs={"text", "stock"}, apart={"rows"})
def right_padding(inputs: dict[str, T], targets: T, number: int) -> Batch:
    return _padded(inputs, targets, right=True)


@at("batch", **ROWS_OF_DOCUMENTS)
def left_padding(inputs: dict[str, T], targets: T, number: int) -> Batch:
    return _padded(inputs, targets, right=False)


def _padded(inputs: dict[str, T], targets: T, right: bool) -> Batch:
    lengths = LENGTH - torch.arange(ROWS) % 4
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    mask = positions < lengths[:, None] if right else positions >= LENGTH - lengths[:, None]
    ids = torch.where(mask, inputs["input_ids"], 0)
    return {**inputs, "input_ids": ids, "attention_mask": mask.long()}, torch.where(mask, targets, IGNORED)


def _rows_without_targets(side: Side) -> None:
    """All rows but the last have none, so that data ranks and microbatches are empty."""
    side.step(0, targets=side.local(one_row(*side.kind.batch(0))[1]))


def one_row(inputs: dict[str, T], targets: T, number: int = 0) -> Batch:
    """Targets of the last row alone; the others have none in the first two batches."""
    targets = targets.clone()
    targets[:-1] = IGNORED
    return inputs, targets


def _batch_without_targets(side: Side) -> None:
    """Its loss is NaN, as PyTorch's mean of nothing, and it adds nothing to the gradients. On one process it is left
    out: a sum that is divided by nothing has gradients of NaN there, if the sum is a product with a mask."""
    side.step(0)
    loss = torch.tensor(torch.nan)
    if not side.alone:
        side.step(0, targets=side.local(torch.full_like(side.kind.batch(0)[1], IGNORED)))
        loss = side.records.pop(list(side.records)[-1])
    side.record("no loss", float(loss.isnan()))


change("rows_without_targets", batch=one_row, needs={"text"})


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


@at("batch", needs={"text", "causal", "stock"}, without={"experts", "recurrent"}, prepare=_llava, meets=False)
def images_in_texts(inputs: dict[str, T], targets: T, number: int) -> Batch:
    """One image in each text, of a LLaVA in the place of the model."""
    ids = inputs["input_ids"]
    pixels = torch.randn(
        len(ids), 3, 16, 16, generator=torch.Generator().manual_seed(300 + number), dtype=torch.float64
    )
    ids = _with_image(torch.where(ids == images.IMAGE, 3, ids), images.IMAGE)
    return {**inputs, "input_ids": ids, "pixel_values": pixels}, _with_image(targets, IGNORED)


def _with_image(tokens: T, value: int) -> T:
    """Sixteen tokens of an image, which have this value, after the first two."""
    return torch.cat([tokens[:, :2], tokens.new_full((len(tokens), 16), value), tokens[:, 2:]], dim=1)


@at("batch", needs={"text", "causal"}, turn=1, apart={"lengths"})
def other_lengths(inputs: dict[str, T], targets: T, number: int) -> Batch:
    """The second step has shorter sequences, of a length that no mesh divides."""
    if number != 1:
        return inputs, targets
    return {name: value[:, :7] for name, value in inputs.items()}, targets[:, :7]


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


@at("step", needs={"causal", "stock"})
def embedded_inputs(side: Side, number: int) -> None:
    generator = torch.Generator().manual_seed(5 + number)
    width, targets = side.model.config.hidden_size, side.kind.batch(number)[1]
    embeds = torch.randn(*targets.shape, width, generator=generator, dtype=torch.float64)
    side.step(number, input_ids=None, inputs_embeds=side.local(embeds))


change("more_microbatches", options={"num_microbatches": 2})  # each of one row on four data ranks at most
change("accumulated_steps", around=twice)
change(
    "deferred_reduction",
    options={"defer": True, "num_microbatches": 2},
    around=twice,
    on=lambda axis: axis.options.get("zero", 0) >= 2,
)


@at("gradients")
def evaluation_between(side: Side, number: int) -> None:
    """Between a backward and the update."""
    side.model.eval()
    side.evaluate(number + 1)
    side.model.train()


def _squared_margin(output: object, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((chosen - 1).square() * (targets != IGNORED)).sum()


change(  # a loss of the user's: the sum over a microbatch, and what it is divided by
    "own_loss",
    options={"loss": _squared_margin, "count": lambda targets: targets.numel()},
    apart={"loss", "labels"},  # with a loss of the user's, labels are an input of the model
    needs={"text"},
)


@feature(
    needs={"experts"},
    overrides={"": {"output_router_logits": True, "router_aux_loss_coef": 0.5}},
    on=lambda axis: not axis.deep,
)
def router_loss(side: Side) -> None:
    """The balance loss of a mixture, without padding and with it; each microbatch of a pipeline has one of its own."""
    side.place(**({} if side.alone or "pp" not in side.axis.sizes else {"num_microbatches": 1}))
    padded, targets = _padded(*side.kind.batch(0), right=True)
    for inputs in ({**side.inputs(), "targets": side.targets()}, side.local({**padded, "targets": targets})):
        with InFloat64():
            if side.alone:
                targets = inputs.pop("targets")
                output = side.model(**inputs, use_cache=False)
                loss = summed_loss(output, targets) / (targets != IGNORED).sum() + 0.5 * output.aux_loss
                loss.backward()
                side.record("loss", loss)
            else:
                side.step(0, **inputs)
