"""Kernels with timestamps: what is added to them, and what is said of it."""

import pytest

from tests.compilers import needs_triton, report, variants
from tileweave.lang.stamps import FLAG, LIBRARY, MAIN, MBARRIER, stamped


@needs_triton
@variants(["roles", "no roles"], ["roles"])
def test_a_kernel_gets_stamps_around_its_waits_and_nothing_else(triton, name):
    r = report("tests.lang.stamping", triton, name)
    assert r["unchanged"] and r["only stamps are added"]
    plain, stamps = r["clocks"]
    assert stamps == plain + 2 * len(r["sites"]) + 2  # and at its start and its end
    assert r["stack"][0] == r["stack"][1] and r["waits"][0] == r["waits"][1]
    roles = {role: {kind for each, kind, _ in r["sites"] if each == role} for role, _, _ in r["sites"]}
    if name == "no roles":
        assert set(roles) == {MAIN} and r["warps"] == 1
        return
    assert set(roles) == {"load_role", "multiply_role", "store_role", "communicate", MAIN} and r["warps"] == 8
    assert roles["load_role"] == {FLAG, MBARRIER} and "wait for wgmma" in roles["multiply_role"]
    assert FLAG in roles["communicate"] and roles[MAIN] == {"wait for the kernel before"}
    places = [place.split(" < ") for _, _, place in r["sites"]]
    assert all(place[-1].startswith("matmul_reduce_scatter_kernel:") for place in places)
    chain = next(place for place in places if place[0].startswith("consumer") and place[1].startswith("multiply"))
    assert [each.split(":")[0] for each in chain[:3]] == ["consumer_wait", "multiply_tile", "multiply_role"]
    lines = (LIBRARY / "tiles/matmul_wgmma.py").read_text().splitlines()
    assert "consumer_wait(" in lines[int(chain[1].split(":")[1]) - 1]


@pytest.mark.parametrize("ptx", ["", ".reqntid 128\n.reqntid 128\n"])
def test_what_is_not_one_kernel(ptx):
    with pytest.raises(ValueError, match="that of one kernel"):
        stamped(ptx, 1 << 40)
