"""Hardware profiles: those that ship, what is refused, and times read from curves."""

import copy
import json

import pytest

from tileweave.planner.hardware import DIRECTIONS, H200, NUMBERS, SHIPPED, from_dict, profile, read


@pytest.mark.parametrize("name", SHIPPED)
def test_profiles_that_ship_name_the_source_of_every_figure(name):
    hardware = profile(name)
    assert hardware.name == name and set(hardware.sources) == set(NUMBERS)
    assert all(number.source for number in hardware.sources.values()) and all(c.source for c in hardware.curves)
    assert (
        hardware.link_gb_per_s < hardware.link_nominal_gb_per_s and hardware.matmul_tflops < hardware.matmul_peak_tflops
    )
    assert all(
        point.gb_per_s < hardware.link_nominal_gb_per_s
        for c in hardware.curves
        if c.over == "link"
        for point in c.points
    )
    assert all(hardware.curve("nccl", direction) for direction in DIRECTIONS[2:])
    assert profile("gb200-nvl72").ranks == 72


def test_a_written_profile_is_read_again(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(H200.to_dict()))
    assert read(str(path)) == H200 == profile(str(path))
    assert read(str(path)).sources == H200.sources


def changed(change):
    values = copy.deepcopy(H200.to_dict())
    change(values)
    return values


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda v: v.update(format="other"), "expected a JSON object with format 'tileweave hardware profile'"),
        (lambda v: v.update(version=2), "version is 2, this release reads 1"),
        (lambda v: v.pop("curves"), "not of the form of a profile: KeyError: 'curves'"),
        (lambda v: v["numbers"].pop("sms"), "numbers lack sms"),
        (lambda v: v["numbers"].update(cores=v["numbers"]["sms"]), "numbers have cores"),
        (lambda v: v["numbers"]["sms"].update(value=0), "numbers.sms.value must be above 0"),
        (lambda v: v["numbers"]["sms"].update(value=13.5), "numbers.sms.value must be whole, got 13.5"),
        (lambda v: v["numbers"]["launch_us"].update(value=float("nan")), "a finite number of at least 0, got nan"),
        (lambda v: v["numbers"]["launch_us"].update(value=True), "a finite number of at least 0, got True"),
        (lambda v: v["numbers"]["sms"].update(kind="guessed"), "kind must be one of 'published', 'measured'"),
        (lambda v: v["numbers"]["sms"].update(source=""), "source must say where the figure is from"),
        (lambda v: v["curves"][0].update(ways=3), "ways must be one of 1, 2"),
        (lambda v: v["curves"][0].update(points=[]), "expected a point at least"),
        (lambda v: v["curves"][0]["points"][0].update(gb_per_s=-1), "gb_per_s must be a finite number"),
        (lambda v: v.update(name=3), "name must be a string, got 3"),
        (lambda v: v.update(capability="9.0a"), "capability must be of the form MAJOR.MINOR, got '9.0a'"),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused_with_the_field(change, said):
    with pytest.raises(ValueError) as error:
        from_dict(changed(change), "a file")
    assert str(error.value).startswith("a file: ") and said in str(error.value)


def test_a_name_that_is_neither_shipped_nor_a_file(tmp_path):
    with pytest.raises(ValueError, match="gpu must be one of h100, h200, b200, gb200-nvl72 or a profile's file"):
        profile("h300")
    with pytest.raises(ValueError, match="cannot be read"):
        profile(str(tmp_path / "none.json"))
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        profile(str(tmp_path / "no.json"))


def test_a_transfer_takes_what_the_curve_says_and_between_its_points_something_between():
    at = [H200.transfer_us("copy_engine", "put", mb << 20) for mb in (1, 2, 4)]
    assert at[0] == pytest.approx((1 << 20) / 123e3) and at[2] == pytest.approx((4 << 20) / 310e3)
    assert at[0] < at[1] < at[2]
    assert H200.transfer_us("copy_engine", "put", 1) == pytest.approx(65536 / 8e3)  # no less than the smallest point
    assert H200.transfer_us("copy_engine", "put", 8e9) == pytest.approx(8e9 / 394e3)
    assert H200.transfer_us("multimem", "put", 1) is None
