"""What ranks run in tests of stopping."""

from __future__ import annotations

import torch.distributed as dist

from parallelize.checkpoint.run import stopping as stop_agreement


def agreed_steps(rank: int, victim: int, at: int, waits: bool) -> int:
    """The step after which a rank stops, where rank `victim` asks for it in step `at`."""
    stop_agreement.WAITS_ABOVE_S = 0.0 if waits else 10.0
    try:
        agreement = stop_agreement.StopAgreement(None, 30, extras=1)
        for step in range(20):
            if agreement.stops(dist.get_rank() == victim and step >= at, [float(dist.get_rank())]):
                agreement.close()
                assert agreement.largest == [3.0]
                return step
        return -1
    finally:
        stop_agreement.WAITS_ABOVE_S = 0.25
