"""The contract suite finds what is broken, and names it."""

import re

import pytest
import torch


def make(**methods):
    """A policy that works, but for some methods."""
    from typing import ClassVar

    from kvcompress import DecodePolicy

    class BasePolicy(DecodePolicy):
        name: ClassVar[str] = "tried"

        def scores(self, view):
            return view.value.float().norm(dim=-1)

        def protected_tokens(self, layer_idx, num_layers):
            return 2

        def protected(self, view):
            return view.last(2)

    return type("TriedPolicy", (BasePolicy,), {"__annotations__": {}, **methods})


def random_scores(self, view):
    return torch.rand(view.positions.shape)


def rows_instead_of_positions(self, view):
    rows = torch.arange(view.held, dtype=torch.float32)
    return (rows % 7).expand(view.positions.shape).clone()


def batch_wide(self, view):
    norms = view.value.float().norm(dim=-1)
    return norms - norms.flatten().sort().values[norms.numel() // 2] * norms.argsort(dim=0)


def in_place(self, view):
    return view.value.abs_().norm(dim=-1)


def with_nan(self, view):
    return torch.full(view.positions.shape, float("nan"))


def half(self, view):
    return view.value.norm(dim=-1).half()


def too_much(self, view):
    return view.last(5)


def one_for_all_heads(self, view):
    return view.value.float().norm(dim=-1).mean(dim=1, keepdim=True).expand(view.positions.shape)


def later_is_better(self, view):
    return torch.arange(view.held, dtype=torch.float32).expand(view.positions.shape)


def the_last_two(self, view):
    return torch.arange(view.held)[None, None] >= view.held - 2


@pytest.mark.parametrize(
    ("methods", "contract", "said"),
    [
        ({"scores": random_scores}, "scores are pure float32", "changed when repeated"),
        ({"scores": random_scores}, "sdpa and eager keep the same", "different rows"),
        ({"scores": rows_instead_of_positions}, "padding changes nothing", "which rows are kept"),
        ({"scores": batch_wide}, "rows of a batch do not meet", "influence each other"),
        ({"scores": in_place}, "scores are pure float32", "changed view.value in place"),
        ({"scores": with_nan}, "scores are pure float32", "NaN"),
        ({"scores": half}, "scores are pure float32", "torch.float16, not torch.float32"),
        (
            {"protected": too_much},
            "no more is protected than stated",
            "names 5 rows, protected_tokens() allows 2",
        ),
        (
            {"any_order": True, "scores": later_is_better},
            "rows in any order are judged alike",
            "scores() depends on the order",
        ),
        (
            {"any_order": True, "protected": the_last_two},
            "rows in any order are judged alike",
            "protected() depends on the order",
        ),
        (
            {"scores": one_for_all_heads},
            "heads are judged one by one",
            "head 0 gets other scores when it is alone: declare across_heads",
        ),
    ],
    ids=lambda value: "-".join(value) if type(value) is dict else "",
)
def test_a_broken_contract_is_found(methods, contract, said):
    from kvcompress.testing import contracts

    with pytest.raises(AssertionError) as caught:
        contracts(make(**methods), capacity=20)[contract]()
    assert said in str(caught.value)


def test_every_broken_contract_is_named():
    from kvcompress.testing import PolicyContractError, check_policy

    with pytest.raises(PolicyContractError, match=r"tried.* breaks \d+ contracts") as caught:
        check_policy(make(scores=half), capacity=20)
    count = int(re.search(r"breaks (\d+) contracts", str(caught.value)).group(1))
    assert count == str(caught.value).count("\n- ")
    assert "- scores are pure float32: " in str(caught.value)
    assert "- beams carry their rows: PolicyConfigError: " in str(caught.value)


def test_state_that_is_not_carried_is_found():
    """A policy that keeps state in itself instead of the cache."""
    from kvcompress.testing import contracts

    memory = {}

    def scores(self, view):
        count = memory[view.layer_idx] = memory.get(view.layer_idx, 0) + 1
        return (view.positions.float() + 1) * (-1) ** count

    with pytest.raises(AssertionError, match="changed when repeated"):
        contracts(make(scores=scores), capacity=20)["scores are pure float32"]()


def test_a_working_policy_passes():
    from kvcompress.testing import check_policy

    check_policy(make(), capacity=20, interval=3)


def test_contracts_are_callables_by_name():
    from kvcompress.testing import contracts

    checks = contracts(make(scores=half), capacity=20)
    checks["string and dict forms read back"]()
    with pytest.raises(AssertionError, match="float16"):
        checks["scores are pure float32"]()


def test_a_budget_too_large_to_try():
    from kvcompress.testing import check_policy

    with pytest.raises(ValueError, match=r"up to 2048 rows .* capacity=20"):
        check_policy("snapkv")


def test_fields_of_an_instance_or_string_are_replaced():
    from kvcompress.testing import contracts

    assert contracts("snapkv:window_size=4", capacity=20)


def test_a_policy_that_evicts_at_decode_derives_from_the_class_for_it():
    from typing import ClassVar

    from kvcompress import Policy, PolicyConfigError

    with pytest.raises(PolicyConfigError, match=r"derive it from kvcompress\.DecodePolicy"):

        class _Wrong(Policy):
            name: ClassVar[str] = "wrong"
            phases: ClassVar = frozenset({"prefill", "decode"})


def test_queries_whose_rows_may_be_gone_are_refused(make_model):
    from kvcompress import PolicyConfigError, press

    greedy = make(query_tokens=lambda self, layer_idx, num_layers: 5)
    with pytest.raises(PolicyConfigError, match="reads 5 queries while decoding"):
        press(make_model(), greedy(capacity=20))
    press(make_model(), greedy(capacity=20, interval=5))
