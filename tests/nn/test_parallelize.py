"""Plans: which layers they name, and what they are told that name none."""

import pytest
import torch
from torch import nn

import tileweave as tw
from tileweave.nn import Column, ColumnParallelLinear, Row, RowParallelLinear, parallelize


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.layers = nn.Embedding(12, 8), nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def kinds(model):
    return {name: type(each) for name, each in model.named_modules() if "Linear" in type(each).__name__}


def run(plan, world=2, make=Model):
    def rank_program(rank, group):
        model = make()
        before = kinds(model)
        try:
            assert parallelize(model, plan, group) is model
        except Exception:
            assert kinds(model) == before  # nothing has been replaced
            raise
        return model

    with tw.virtual_world(world, device="cpu") as w:
        return w.run(rank_program)[0]


def test_wildcards_stand_for_one_part_of_a_name():
    model = run({"layers.*.[qk]": "column", "layers.1.out": Row(max_sms=7), "head": Column(False)})
    assert kinds(model) == {
        "layers.0.q": ColumnParallelLinear, "layers.0.k": ColumnParallelLinear, "layers.0.out": nn.Linear,
        "layers.1.q": ColumnParallelLinear, "layers.1.k": ColumnParallelLinear, "layers.1.out": RowParallelLinear,
        "head": ColumnParallelLinear,
    }  # fmt: skip
    assert model.layers[1].out.max_sms == 7 and not model.head.sequence_parallel


def test_a_model_without_data_can_be_split_and_loaded_later():
    saved = Model().state_dict()

    def rank_program(rank, group):
        with torch.device("meta"):
            model = Model()
        parallelize(model, {"layers.*.*": "column"}, group)
        model.to_empty(device="cpu").load_state_dict(saved)
        return model.layers[0].q.weight

    with tw.virtual_world(2, device="cpu") as w:
        assert torch.equal(torch.cat(w.run(rank_program)), saved["layers.0.q.weight"])


@pytest.mark.parametrize(
    "plan, words",
    [
        ({"layer.*.q": "column"}, r"plan: 'layer\.\*\.q' matches no module; there is layers\.[01]\.q, "),
        ({"layers.*": "column"}, r"'layers\.\*' matches layers\.0 \(Layer\), layers\.1 \(Layer\), but no torch"),
        ({"embed": "row"}, r"'embed' matches embed \(Embedding\), but no torch\.nn\.Linear; there is head"),
        ({"head": "colwise"}, r"the style of 'head' must be 'column', 'row', .* got 'colwise'"),
        ({"layers.*.q": "column", "layers.0.*": "row"}, r"'layers\.0\.q' has two styles, Column.*by .*, Row"),
        ({"layers.*.q": "column", "head": "column"},
         r"head: ColumnParallelLinear: out_features = 12 .* size 5; 10 or 15"),
    ],
)  # fmt: skip
def test_wrong_plans_replace_nothing(plan, words):
    world = 5 if "size 5" in words else 2
    make = (lambda: _fives()) if world == 5 else Model
    with pytest.raises(ValueError, match=words):
        run(plan, world, make)


def _fives():
    model = Model()
    for layer in model.layers:
        layer.q = nn.Linear(8, 10)
    return model


def test_patterns_may_agree():
    assert isinstance(run({"layers.*.q": "column", "layers.0.*": "column"}).layers[0].q, ColumnParallelLinear)


def test_tied_weights_are_not_torn_apart():
    with pytest.raises(ValueError, match=r"plan: head\.weight is tied to embed\.weight"):
        run({"head": "column"}, make=lambda: Model(tied=True))


def test_parameters_that_are_not_plain_are_refused():
    def scaled():
        model = Model()
        model.head.scale = nn.Parameter(torch.ones(1))
        return model

    with pytest.raises(TypeError, match=r"plan: head: .* plain parameters, got weight \(Parameter\), scale"):
        run({"layers.*.q": "column", "head": "column"}, make=scaled)


def test_what_is_no_plan_or_no_group():
    with pytest.raises(TypeError, match="plan: expected a dict of names and styles, got str"):
        parallelize(Model(), "column")
    with pytest.raises(TypeError, match="group: expected"):
        parallelize(Model(), {"head": "column"}, group=2)


OPTIONS = [
    (dict(sequence_dim="1"), TypeError, "sequence_dim must be an int, got '1'"),
    (dict(sequence_dim=None), TypeError, "sequence_dim must be an int, got None"),
    (dict(sequence_parallel=1), TypeError, "sequence_parallel must be True or False, got 1"),
    (dict(max_sms=2.0), TypeError, "max_sms must be an int or None, got 2.0"),
    (dict(max_sms=True), TypeError, "max_sms must be an int or None, got True"),
    (dict(max_sms=0), ValueError, "max_sms must be at least 1, or None for all, got 0"),
]


@pytest.mark.parametrize("options, error, text", [*OPTIONS, (dict(seed="1"), TypeError, "seed must be an int or None")])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_options_of_other_types_are_refused_when_a_layer_is_made(kind, options, error, text):
    with pytest.raises(error, match=f"{kind.__name__}: {text}"):
        kind(8, 8, **options)


@pytest.mark.parametrize(
    "options, error, text", [*OPTIONS, (dict(regather="no"), TypeError, "regather must be True or")]
)
def test_options_of_other_types_are_refused_before_anything_is_replaced(options, error, text):
    model = Model()
    with pytest.raises(error, match=f"plan: head: ColumnParallelLinear: {text}"):
        parallelize(model, {"head": Column(**options)})
    assert type(model.head) is nn.Linear
    with pytest.raises(TypeError, match=r"linear must be a torch\.nn\.Linear, got Embedding"):
        ColumnParallelLinear.from_linear(nn.Embedding(2, 2))


def test_hooks_and_keys_that_are_no_names_are_refused():
    def hooked():
        model = Model()
        model.head.register_forward_hook(lambda *_: None)
        return model

    with pytest.raises(ValueError, match=r"plan: head has hooks \(_forward_hooks\)"):
        run({"head": "column"}, make=hooked)
    with pytest.raises(TypeError, match="names of layers, got 3"):
        run({3: "column"})
