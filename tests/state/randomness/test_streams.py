"""Named streams of random numbers: equal or different over the axes of a mesh, saved and continued."""

from __future__ import annotations

import io
import random
import subprocess
import sys

import numpy
import pytest
import torch

from parallelize import MeshError, ModelError
from parallelize.state.randomness.generators import random_state, set_random_state
from parallelize.state.randomness.streams import Streams


class Mesh:
    """The little that streams ask of a `DeviceMesh`."""

    mesh_dim_names, shape = ("dp", "tp"), (8, 8)

    def __init__(self, dp: int, tp: int):
        self.places = dp, tp

    def get_local_rank(self, dim: int) -> int:
        return self.places[dim]


def draws() -> tuple[float, ...]:
    return (float(torch.rand(())), random.random(), float(numpy.random.rand()), float(torch.randn(())))


def streams(**places: int) -> Streams:
    made = Streams(3, Mesh(**({"dp": 0, "tp": 0} | places)))
    made.declare("shared")
    made.declare("augment", differs_over=("dp",))
    return made


def test_streams_agree_and_differ_over_their_axes():
    drawn = {}
    for dp in range(2):
        for tp in range(2):
            here = streams(dp=dp, tp=tp)
            for name in ("shared", "augment"):
                with here(name):
                    drawn[name, dp, tp] = draws()
    assert len({drawn["shared", dp, tp] for dp in range(2) for tp in range(2)}) == 1
    assert drawn["augment", 0, 0] == drawn["augment", 0, 1] != drawn["augment", 1, 0] == drawn["augment", 1, 1]
    assert not set(drawn["augment", 0, 0]) & set(drawn["shared", 0, 0])


def test_what_is_outside_a_stream_does_not_notice_it():
    def seeded() -> None:
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)

    seeded()
    expected = [draws() for _ in range(3)]
    seeded()
    here = streams()
    actual = [draws()]
    with here("shared"):
        draws()
    actual.append(draws())
    with pytest.raises(ZeroDivisionError), here("augment"):
        draws()
        raise ZeroDivisionError
    actual.append(draws())
    assert actual == expected


def test_streams_nest_in_any_order_and_each_goes_on_where_it_was():
    plain, nested = streams(), streams()
    expected = {}
    for name in ("shared", "augment"):
        with plain(name):
            expected[name] = [draws() for _ in range(4)]
    actual: dict[str, list] = {"shared": [], "augment": []}
    with nested("shared"):
        actual["shared"].append(draws())
        with nested("augment"):
            actual["augment"].append(draws())
            with nested("shared"):
                actual["shared"].append(draws())
            actual["augment"].append(draws())
        actual["shared"].append(draws())
    with nested("augment"):
        actual["augment"] += [draws(), draws()]
    with nested("shared"):
        actual["shared"].append(draws())
    assert actual == expected


def test_streams_are_saved_and_go_on():
    here = streams()
    with here("augment"):
        draws()
    file = io.BytesIO()
    torch.save(here.state_dict(), file)
    assert file.tell() < 50_000
    with here("augment"):
        expected = draws()
    with here("shared"):
        fresh = draws()
    file.seek(0)
    again = Streams(99, Mesh(dp=0, tp=1))
    again.load_state_dict(torch.load(file, weights_only=True))
    with again("augment"):
        assert draws() == expected
    with again("shared"):
        assert draws() == fresh
    file.seek(0)
    moved = Streams(99, Mesh(dp=1, tp=0))  # another place: its own numbers, from the start
    moved.load_state_dict(torch.load(file, weights_only=True))
    with moved("augment"), streams(dp=1)("augment"):
        pass
    with moved("augment"):
        actual = draws()
    with streams(dp=1)("augment"):
        assert actual == draws()


@pytest.mark.processes
def test_numpy_is_used_only_where_it_is_imported():
    code = (
        "import sys, random, torch\n"
        "from parallelize.state.randomness.streams import Streams\n"
        "had = 'numpy' in sys.modules\n"
        "s = Streams(0); s.declare('a')\n"
        "with s('a'): random.random()\n"
        "assert ('numpy' in sys.modules) == had and ('numpy' in s.state_dict()['states']['a']) == had\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_mistakes_with_streams_are_named():
    here = streams()
    for call, slug, kind in (
        (lambda: here("augmnet").__enter__(), "unknown-stream", ModelError),
        (lambda: here.declare("x", ("pp",)), "unknown-axis", MeshError),
        (lambda: here.declare("augment"), "stream-declared", ModelError),
    ):
        with pytest.raises(kind) as error:
            call()
        assert error.value.slugs == (slug,)
    with here("shared"), pytest.raises(ModelError) as error:
        here.load_state_dict(streams().state_dict())
    assert error.value.slugs == ("stream-open",)


# -- a mapping of states -----------------------------------------------------------------------------------------------


def test_streams_are_a_mapping_of_their_states():
    here, other = streams(), streams()
    outside = random_state()
    assert list(here) == ["shared", "augment"] and len(here) == 2 and "shared" in here and "absent" not in here
    start = here["augment"]
    assert torch.equal(random_state()["torch"], outside["torch"]), "reading a state draws nothing"
    with here("augment"):
        first = draws()
        inside = here["augment"]
        second = draws()
    here["augment"] = start
    with here("augment"):
        assert draws() == first
    other["augment"] = inside
    with other("augment"):
        assert draws() == second


def test_states_that_are_none_are_refused():
    here = streams()
    for slug, call in (
        ("unknown-stream", lambda: here["absent"]),
        ("unknown-stream", lambda: here.__setitem__("absent", random_state())),
        ("not-a-random-state", lambda: here.__setitem__("shared", {"torch": 1, "seed": 2})),
        ("not-a-random-state", lambda: set_random_state([])),
    ):
        with pytest.raises(ModelError) as caught:
            call()
        assert caught.value.slugs == (slug,)
    with here("shared"), pytest.raises(ModelError) as caught:
        here["shared"] = random_state()
    assert caught.value.slugs == ("stream-open",)


def test_a_state_of_one_generator_leaves_the_others_where_they_are():
    whole, partial = streams(), streams()
    for here in (whole, partial):
        with here("shared"):
            draws()
    start = streams()["shared"]["python"]
    partial["shared"] = {"python": start}
    whole["shared"] = whole["shared"] | {"python": start}
    drawn = []
    for here in (whole, partial):
        with here("shared"):
            drawn.append(draws())
    assert drawn[0] == drawn[1]


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    here = streams()
    with here("shared"):
        draws()
    good, other = here.state_dict(), Streams(9, Mesh(dp=0, tp=0))
    other.declare("own")
    for wrong, error in (
        ({**good, "over": good["over"] | {"augment": ["pp"]}}, MeshError),
        ({**good, "states": {"shared": {"torch": "junk"}}}, ModelError),
    ):
        with pytest.raises(error):
            other.load_state_dict(wrong)
        assert other.seed == 9 and list(other) == ["own"]
    with pytest.raises(ModelError) as caught:
        here["shared"] = {"torch": "junk"}
    assert caught.value.slugs == ("not-a-random-state",)
