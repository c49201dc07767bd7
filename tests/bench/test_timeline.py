"""What bench/timeline.py makes of stamps. No GPU is needed."""

from tileweave.bench.timeline import launches, told
from tileweave.emulator.timeline import Span
from tileweave.fabric.stamping import BETWEEN, RESIDENT, Timeline
from tileweave.lang.stamps import FLAG


def span(launch, role, kind, start, end, cta=0):
    return Span(0, cta, launch, role, kind, kind, start, end, "")


def test_each_launch_has_its_own_time_and_shares():
    spans = [
        span(1, "SM", RESIDENT, 50.0, 150.0),
        span(1, "SM", RESIDENT, 60.0, 148.0, cta=1),
        span(1, "load", FLAG, 50.0, 75.0),
        span(1, "load", BETWEEN, 75.0, 150.0),
        span(0, "SM", RESIDENT, 0.0, 20.0),
        span(0, "main", BETWEEN, 0.0, 10.0),
    ]
    first, second = launches(Timeline(spans, 150.0, 0, {(0, 1): "multiplies", (0, 0): "gathers"}))
    assert [first["kernel"], first["start_us"], first["end_us"]] == ["gathers", 0.0, 20.0]
    assert [second["kernel"], second["start_us"], second["end_us"]] == ["multiplies", 50.0, 150.0]
    (load,) = second["roles"]
    assert (load["role"], load["ctas"], load["busy"], load["waits_for_flags"]) == ("load", 1, 0.75, 0.25)
    row = {"op": "an_op", "ranks": 2, "m": 64, "launches": [first, second], "lost": 0}
    lines = told(row).splitlines()
    assert lines[0] == "an_op m=64:" and "gathers" in lines[1] and "waits for flags 25%" in lines[3]
