"""The public calls on GPU arrays, one mode after the other in one job: calls.py MODE..."""

from __future__ import annotations

from tests.gpu.programs import arrays, capture, stress
from tests.gpu.programs.job import main

if __name__ == "__main__":
    main(
        capture.first,
        capture.replays,
        capture.refused,
        arrays.types,
        arrays.cupys_bfloat16,
        arrays.strided,
        arrays.edges,
        arrays.staged_kinds,
        arrays.another_device,
        stress.stale,
        stress.scratch_on_two_streams,
    )
