"""Which parameter belongs to which group, by description and by the module."""

import pytest
import torch
from torch import nn

from ds_lightning.errors import ConfigError
from ds_lightning.optim.from_config import build_optimizer
from ds_lightning.optim.groups import groups_of_module, param_groups


class OwnNorm(nn.LayerNorm):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": OwnNorm(4), "fc": nn.Linear(4, 4)}) for _ in range(2))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.emb.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))


def described(blocks, module=None):
    """Names of the parameters of each group, with what else it says."""
    module = module or Net()
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        ([names[id(p)] for p in group["params"]], {key: value for key, value in group.items() if key != "params"})
        for group in param_groups(module, blocks)
    ]


FC = ["blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.1.fc.weight", "blocks.1.fc.bias"]
NORMS = ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight", "blocks.1.norm.bias"]


def test_biases_and_norms_are_a_group_and_the_rest_comes_first():
    rest, special = described([{"names": ["*.bias", "gain"], "modules": ["LayerNorm"], "weight_decay": 0.0}])
    assert rest == (["emb.weight", FC[0], FC[2]], {})
    wanted = ["gain", NORMS[0], NORMS[1], FC[1], NORMS[2], NORMS[3], FC[3], "head.bias"]
    assert special == (wanted, {"weight_decay": 0.0})


@pytest.mark.parametrize(
    ("block", "taken"),
    [
        ({"names": "blocks.0.*"}, [NORMS[0], NORMS[1], FC[0], FC[1]]),
        ({"names": [r"regex:^blocks\.\d\.fc\.w"]}, [FC[0], FC[2]]),
        ({"names": ["head.weight"]}, ["emb.weight"]),  # another name of a tied one
        ({"names": ["emb.weight"]}, ["emb.weight"]),
        ({"modules": ["*Norm"]}, NORMS),
        ({"modules": "OwnNorm"}, NORMS),
        ({"modules": ["Embedding"]}, ["emb.weight"]),
        ({"max_ndim": 0}, ["gain"]),
        ({"modules": ["Linear"], "max_ndim": 1}, [FC[1], FC[3], "head.bias"]),
    ],
    ids=str,
)
def test_a_block_takes_what_it_describes(block, taken):
    groups = described([block])
    assert groups[-1][0] == taken
    assert sorted(name for names, _ in groups for name in names) == sorted(
        name for name, p in Net().named_parameters() if p.requires_grad
    )


def test_the_first_block_that_matches_takes_a_parameter():
    groups = described([{"name": "a", "max_ndim": 0, "lr": 1.0}, {"name": "b", "max_ndim": 1}, {"names": ["emb.*"]}])
    assert [(names[:1], rest.get("name")) for names, rest in groups] == [
        ([FC[0]], "default"),
        (["gain"], "a"),
        ([NORMS[0]], "b"),
        (["emb.weight"], None),
    ]


def test_nothing_is_left_for_a_first_group_that_would_be_empty():
    assert len(described([{"names": ["*"], "lr": 0.1}])) == 1


def test_wrappers_of_compiled_modules_do_not_show_in_names():
    module = nn.Module()
    module.add_module("_orig_mod", Net())
    assert described([{"names": ["blocks.0.fc.bias"]}], module)[1][0] == ["_orig_mod.blocks.0.fc.bias"]


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([{"names": ["*.bais"]}], r"0: matches no parameter: .*did you mean 'bias'"),
        ([{"names": ["blocks.0.fc.wieght"]}], r"did you mean 'blocks\.0\.fc\.weight'"),
        ([{"modules": ["LayerNrom"]}], "did you mean 'LayerNorm'"),
        ([{"names": ["frozen.*"]}], "frozen parameters alone.*frozen.weight, frozen.bias"),
        ([{"max_ndim": 1}, {"names": ["*.bias"]}], "1: an earlier block takes all"),
        ([{"lr": 0.1}], "does not say which parameters; it needs 'names', 'modules' or 'max_ndim'"),
        ([{"names": ["regex:("]}], "no regular expression"),
        ([{"name": "x", "max_ndim": 0}, {"name": "x", "max_ndim": 1}], "more than one group is called 'x'"),
        ([{"name": "default", "max_ndim": 0}], "'default', the name of what no block takes"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_with_a_guess(blocks, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        param_groups(Net(), blocks)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        param_groups(Net(), [{"names": ["*.bais"]}, {"lr": 1.0}], "here")
    assert "here.0" in str(error.value)
    assert "here.1" in str(error.value)


class WithHook(Net):
    def __init__(self, change=lambda groups: groups):
        super().__init__()
        self.change = change

    def configure_param_groups(self):
        trainable = [p for p in self.parameters() if p.requires_grad]
        return self.change(
            [
                {"params": [p for p in trainable if p.ndim > 1]},
                {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
            ]
        )


def test_a_module_makes_its_groups_itself():
    assert groups_of_module(Net()) is None
    groups = groups_of_module(WithHook())
    assert [len(group["params"]) for group in groups] == [3, 8]
    optimizer = build_optimizer("AdamW", {"weight_decay": 0.1, "betas": [0.9, 0.95]}, groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda groups: None, "must return a list of groups.*NoneType"),
        (lambda groups: groups[0], "must return a list of groups.*dict"),
        (lambda groups: groups[:1], "leaves out gain, blocks.0.norm.weight.* and 3 more.*freeze them"),
        (lambda groups: [{"params": [nn.Parameter(torch.ones(1))]}, *groups], "no parameters of the module"),
    ],
    ids=["none", "dict", "left out", "foreign"],
)
def test_what_a_module_cannot_mean_is_refused(change, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        groups_of_module(WithHook(change))


@pytest.mark.parametrize(
    ("values", "where", "said"),
    [
        ({"wieght_decay": 0.0}, "optimizer.param_groups", r"optimizer\.param_groups\.0\.wieght_decay.*'weight_decay'"),
        ({"momentum": 0.9}, "optimizer.param_groups", "groups have 'lr'"),
        ({"wieght_decay": 0.0}, "Net.configure_param_groups()", "did you mean 'weight_decay'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["AdamW", "RAdam", "AdamW8bit"])
def test_a_value_that_the_optimizer_would_not_look_at_is_refused(kind, values, where, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        build_optimizer(kind, {"lr": 0.1}, [{"params": list(Net().parameters()), **values}], where)


def test_a_module_may_mark_its_groups_for_itself():
    groups = [{"params": list(Net().parameters()), "depth_of_block": 3, "name": "all"}]
    assert build_optimizer("AdamW", {}, groups, "Net").param_groups[0]["depth_of_block"] == 3
