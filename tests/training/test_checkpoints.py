import json
import math
import os
import re
import tracemalloc

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gramcert.files import write_atomically
from gramcert.training.checkpoints import (
    CONFIGURATION,
    MODEL,
    STATE,
    Trained,
    claimed,
    load_state,
    save_model,
    save_state,
)
from gramcert.training.networks import build

CLASSES = tuple("0123456789")
FACTS = {"step": 3, "loss": 0.1 + 0.2, "seconds": 1e-300}


def names(folder):
    return {path.name for path in folder.iterdir()}


def network_of(configuration):
    network = build(configuration, (1, 8, 8), 10, [0.3])
    return network, torch.optim.Adam(network.parameters(), 0.01, (0.5, 0.9))


def trained_for(network, adam, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        adam.zero_grad()
        network(torch.rand(8, 1, 8, 8, generator=generator)).square().mean().backward()
        adam.step()


def require_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes()


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path, monkeypatch, tiny):
    configuration = tiny()
    with claimed(tmp_path, configuration):
        pass
    before = names(tmp_path)
    unfinished = set()
    monkeypatch.setattr(os, "fsync", lambda _: unfinished.update(names(tmp_path) - before))
    write_atomically(tmp_path / STATE, b"content")
    assert len(unfinished) == 1
    others = {".hidden", "unfinished", ".draft.unfinished"}
    for name in (*unfinished, *others):
        (tmp_path / name).touch()
    with claimed(tmp_path, configuration):
        assert names(tmp_path) == before | {STATE} | others


def test_folders_of_others_are_left_as_they_are(tmp_path, tiny):
    for name in (".lock", ".draft.unfinished", "x"):
        (tmp_path / name).write_text(name)
    with pytest.raises(ValueError, match="expected an empty folder"), claimed(tmp_path, tiny()):
        pass
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: name for name in (".lock", ".draft.unfinished", "x")
    }


def test_a_run_that_was_killed_at_its_very_beginning_goes_on(tmp_path, tiny):
    for name in (".lock", f".{CONFIGURATION}.123.unfinished"):
        (tmp_path / name).touch()
    with claimed(tmp_path, tiny()):
        assert names(tmp_path) == {".lock", CONFIGURATION}


def test_a_lock_does_not_empty_what_it_points_to(tmp_path, tiny):
    victim = tmp_path / "victim"
    victim.write_text("content")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(ValueError, match="not a folder that can be written"), claimed(folder, tiny()):
        pass
    assert victim.read_text() == "content"


def test_a_folder_is_one_run_s_alone(tmp_path, tiny):
    with claimed(tmp_path, tiny()):
        other = claimed(tmp_path, tiny())
        with pytest.raises(ValueError, match="another process is training in it"):
            other.__enter__()
    with claimed(tmp_path, tiny()):  # free again
        pass


def test_a_state_comes_back_bit_for_bit_and_goes_on_the_same(tmp_path, tiny):
    network, adam = network_of(tiny())
    trained_for(network, adam, 3)
    save_state(tmp_path, network, adam, FACTS)
    other, other_adam = network_of(tiny(seed="1"))
    assert load_state(tmp_path, other, other_adam, 9) == FACTS
    require_same_bits(network.state_dict(), other.state_dict())
    moments, other_moments = adam.state_dict()["state"], other_adam.state_dict()["state"]
    assert moments.keys() == other_moments.keys() == set(range(len(list(network.parameters()))))
    for index, values in moments.items():
        require_same_bits(values, other_moments[index])
    for pair in ((network, adam), (other, other_adam)):
        trained_for(*pair, 2, seed=1)
    require_same_bits(network.state_dict(), other.state_dict())
    assert names(tmp_path) == {STATE}


def test_facts_that_are_numbers_in_quotes(state, tiny):
    rewritten(state, lambda tensors: None, {"facts": json.dumps(FACTS | {"loss": "0.5"})})
    assert load_state(state.parent, *network_of(tiny()), 9)["loss"] == 0.5


def test_a_lost_network_does_not_replace_a_good_one(state, tiny):
    before = state.read_bytes()
    network, adam = network_of(tiny())
    trained_for(network, adam, 1)
    with torch.no_grad():
        network[2].bias[0] = torch.inf
    with pytest.raises(ValueError, match=r"train, step 3: NaN or infinity in model\.2\.bias; a smaller lr may help"):
        save_state(state.parent, network, adam, FACTS)
    assert state.read_bytes() == before


def test_no_state(tmp_path, tiny):
    network, adam = network_of(tiny())
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert load_state(tmp_path, network, adam, 9) is None
    require_same_bits(before, network.state_dict())


def rewritten(path, change, metadata=None):
    """The file with its tensors, and perhaps its metadata, changed."""
    with safe_open(path, "pt") as file:
        kept = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, kept if metadata is None else metadata)


def damaged(content):
    """What is left of a file that was cut or overwritten."""
    header = int.from_bytes(content[:8], "little")
    return {
        "empty": b"",
        "seven bytes": content[:7],
        "half of the header": content[: header // 2],
        "header only": content[: 8 + header],
        "last byte missing": content[:-1],
        "one byte more": content + b"x",
        "enormous header": (2**62).to_bytes(8, "little") + content[8:],
        "header that is no JSON": content[:8] + b"\0" * header + content[8 + header :],
        "other places": content.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
        "pickle": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    }


@pytest.fixture
def state(tmp_path, tiny):
    network, adam = network_of(tiny())
    trained_for(network, adam, FACTS["step"])
    save_state(tmp_path, network, adam, FACTS)
    return tmp_path / STATE


@pytest.mark.parametrize("kind", damaged(bytes(100)))
def test_damaged_states(state, tiny, kind):
    state.write_bytes(damaged(state.read_bytes())[kind])
    with pytest.raises(ValueError, match=f"^{re.escape(str(state))}: cannot be read as safetensors"):
        load_state(state.parent, *network_of(tiny()), 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.2.weight"), r"expected model\.2\.weight of shape .*, got nothing"),
        (lambda tensors: tensors.update({"model.9.weight": torch.zeros(1)}), "'model.9.weight' is not part of this"),
        (lambda tensors: tensors.update({"model.2.bias": torch.zeros(5)}), r"expected model\.2\.bias of shape \(4,\)"),
        (lambda tensors: tensors.update({"model.2.bias": torch.zeros(4).double()}), r"expected model\.2\.bias of type"),
        (lambda tensors: tensors["model.2.weight"].fill_(torch.nan), "expected finite weights, got NaN or infinity in"),
        (lambda tensors: tensors.update({"optimizer.0.exp_avg": torch.zeros(2)}), r"expected optimizer\.0\.exp_avg of"),
        (
            lambda tensors: tensors.update({"optimizer.0.exp_avg": torch.tensor(0.0)}),
            r"expected optimizer\.0\.exp_avg of",
        ),
        (
            lambda tensors: tensors.pop("optimizer.0.exp_avg"),
            r"expected optimizer\.0\.exp_avg of shape .*, got nothing",
        ),
        (
            lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("opt")],
            r"expected optimizer\.0\.step",
        ),
        (
            lambda tensors: tensors["optimizer.0.step"].fill_(-1),
            "not a state of this run \\(moments that Adam cannot have",
        ),
        (
            lambda tensors: tensors["optimizer.0.step"].fill_(2),
            "not a state of this run \\(moments that Adam cannot have",
        ),
        (lambda tensors: tensors["optimizer.0.exp_avg_sq"].fill_(-1), "not a state of this run"),
        (lambda tensors: tensors["optimizer.0.exp_avg_sq"].fill_(torch.nan), "not a state of this run"),
        (
            lambda tensors: tensors.update({"optimizer.99.exp_avg": torch.zeros(2)}),
            "'optimizer.99.exp_avg' is not part",
        ),
        (lambda tensors: tensors.update({"optimizer.x.exp_avg": torch.zeros(2)}), "'optimizer.x.exp_avg' is not part"),
        (lambda tensors: tensors.update({"something": torch.zeros(2)}), "'something' is not part of this network"),
    ],
)
def test_states_of_something_else(state, tiny, change, message):
    rewritten(state, change)
    with pytest.raises(ValueError, match=f"^{re.escape(str(state))}: {message}"):
        load_state(state.parent, *network_of(tiny()), 9)


@pytest.mark.parametrize(
    "facts",
    ["{", "{}", "[]", "[1]", "null", "[" * 100_000]
    + [json.dumps(FACTS | {"step": step}) for step in (0, -3, 10, 99, None, "1", 1.0, True)]
    + [json.dumps(FACTS | {"loss": loss}) for loss in (None, math.nan, math.inf, "x", [])]
    + [json.dumps(FACTS | {"seconds": seconds}) for seconds in (None, -1, math.inf)]
    + [json.dumps({name: FACTS[name] for name in FACTS if name != missing}) for missing in ("step", "loss", "seconds")],
    ids=range(25),
)
def test_facts_that_cannot_be(state, tiny, facts):
    rewritten(state, lambda tensors: None, {"facts": facts})
    with pytest.raises(ValueError, match="not a state of this run"):
        load_state(state.parent, *network_of(tiny()), 9)


@pytest.mark.parametrize("metadata", [{}, {"facts": "{"}])
def test_states_without_facts(state, tiny, metadata):
    rewritten(state, lambda tensors: None, metadata)
    with pytest.raises(ValueError, match="not a state of this run"):
        load_state(state.parent, *network_of(tiny()), 9)


def test_a_state_of_another_network(state, tiny):
    with pytest.raises(ValueError, match=r"state\.safetensors: expected model\.2\.weight of shape"):
        load_state(state.parent, *network_of(tiny(widths="8")), 9)


@pytest.fixture
def saved(tmp_path, tiny):
    """A finished network, and its file."""
    network, adam = network_of(tiny())
    trained_for(network, adam, 2)
    save_model(tmp_path, network, tiny(), (1, 8, 8), CLASSES, {"steps": 2})
    return network, tmp_path / MODEL


def test_a_network_comes_back(saved, tiny):
    network, file = saved
    assert names(file.parent) == {MODEL}
    x = torch.rand(4, 1, 8, 8)
    for path in (file, file.parent):
        found = Trained(path)
        require_same_bits(found.model.state_dict(), network.state_dict())
        assert not found.model.training
        assert torch.equal(found.model(x), network.eval()(x))
        assert found.configuration == tiny()
        assert (found.shape, found.classes, found.facts) == ((1, 8, 8), CLASSES, {"steps": 2})


def test_no_network(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: expected a folder of `gramcert train` with a"):
            Trained(path)


@pytest.mark.parametrize("kind", damaged(bytes(100)))
def test_damaged_networks(saved, kind):
    _, file = saved
    file.write_bytes(damaged(file.read_bytes())[kind])
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: cannot be read as safetensors"):
        Trained(file)


def test_networks_with_bytes_that_are_wrong(saved):
    """Each is refused by name, or is a network whose weights are finite."""
    _, file = saved
    content = file.read_bytes()
    generator = torch.Generator().manual_seed(0)
    refusals = []
    for place in torch.randint(len(content), (60,), generator=generator).tolist():
        changed = bytearray(content)
        changed[place] ^= 0x7F
        file.write_bytes(changed)
        try:
            found = Trained(file)
        except ValueError as error:
            refusals.append(str(error))
        else:
            assert all(bool(weight.isfinite().all()) for weight in found.model.state_dict().values())
    assert len(refusals) > 10
    assert all(text.startswith(f"{file}: ") for text in refusals)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["2.weight"].view(-1)[5].fill_(torch.nan), r"got NaN or infinity in 2\.weight"),
        (lambda tensors: tensors["0.values"].fill_(-torch.inf), r"got NaN or infinity in 0\.values"),
        (lambda tensors: tensors.pop("5.log_q"), r"expected 5\.log_q of shape \(8,\), got nothing"),
        (lambda tensors: tensors.update({"5.log_q": torch.zeros(9)}), r"5\.log_q of shape \(8,\), got \(9,\)"),
        (lambda tensors: tensors.update({"5.log_q": torch.zeros(8, 1)}), r"5\.log_q of shape \(8,\), got \(8, 1\)"),
        (lambda tensors: tensors.update({"9.bias": torch.zeros(9)}), "'9.bias' is not part of this network"),
        (lambda tensors: tensors.update({"2.bias": torch.zeros(4, dtype=torch.float64)}), r"type torch\.float32, got"),
        (lambda tensors: tensors.update({"2.bias": torch.zeros(4, dtype=torch.int64)}), r"type torch\.float32, got"),
        (lambda tensors: tensors.update({"2.bias": torch.zeros(4, dtype=torch.complex64)}), "got torch.complex64"),
        (lambda tensors: tensors.update({"2.bias": torch.zeros(4).to(torch.float8_e5m2)}), "got torch.float8_e5m2"),
    ],
)
def test_weights_that_are_wrong(saved, change, message):
    _, file = saved
    rewritten(file, change)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: .*{message}"):
        Trained(file)


def metadata_of(file):
    with safe_open(file, "pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "'no format'"), ("gramcert network 2", "'gramcert network 2'"), ("pt", "'pt'")],
)
def test_other_formats(saved, found, message):
    _, file = saved
    metadata = metadata_of(file)
    del metadata["format"]
    rewritten(file, lambda tensors: None, metadata | ({"format": found} if found else {}))
    with pytest.raises(ValueError, match=f"expected 'gramcert network 1', got {message}"):
        Trained(file)


@pytest.mark.parametrize("key", ["configuration", "shape", "classes", "facts"])
@pytest.mark.parametrize("text", [None, "", "null", "3", "{", "[" * 100_000])
def test_metadata_that_cannot_be_used(saved, key, text):
    _, file = saved
    metadata = metadata_of(file)
    if text is None:
        del metadata[key]
    else:
        metadata[key] = text
    if key == "facts" and text in ("null", "3"):
        return  # whatever the facts are, the network does not depend on them
    rewritten(file, lambda tensors: None, metadata)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: its metadata cannot be used \("):
        Trained(file)


@pytest.mark.parametrize(
    "shape",
    [
        "[1, 8]",
        "[1, 8, 8, 8]",
        '["a", 8, 8]',
        "[1, 8, null]",
        "[NaN, 8, 8]",
        "[1, 8, Infinity]",
        "[0, 8, 8]",
        "[-1, 8, 8]",
        "[1, 0, 0]",
        "[1, 7, 8]",
        "[10000000000, 8, 8]",
        "[1, 1000000000000, 1000000000000]",
        f"[1, {10**40}, {10**40}]",
    ],
)
def test_shapes_that_are_none_or_enormous(saved, shape):
    _, file = saved
    rewritten(file, lambda tensors: None, metadata_of(file) | {"shape": shape})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: its metadata cannot be used \("):
            Trained(file)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Terabytes, if they were taken: then the error would be torch's, of memory.
        ({"widths": [10**6]}, r"expected 2\.weight of shape \(4, 1000000, 3, 3\)"),
        ({"dense_inner": 10**11}, r"its metadata cannot be used"),
        ({"dense_inner": 10**9}, r"expected 5\.weight of shape \(1000000000, 64\)"),
        ({"inner": [10**9]}, r"expected 2\.weight of shape \(1000000000, 4, 3, 3\)"),
        ({"kernel": 10**6 + 1}, r"its metadata cannot be used"),
        ({"iterations": 10**9}, r"its metadata cannot be used"),
        ({"widths": [2**31 - 1]}, "its metadata cannot be used"),
        ({"widths": [2**31 - 1], "inner": [2**31 - 1], "kernel": 2**31 - 1}, "its metadata cannot be used"),
        ({"kernel": 10**12 + 1}, "its metadata cannot be used"),
        ({"blocks": [10**9]}, "its metadata cannot be used"),
    ],
)
def test_a_file_that_describes_an_enormous_network(saved, changes, message):
    _, file = saved
    metadata = metadata_of(file)
    metadata["configuration"] = json.dumps(json.loads(metadata["configuration"]) | changes)
    rewritten(file, lambda tensors: None, metadata)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: {message}"):
        Trained(file)


def test_more_classes_than_the_head_has(saved):
    _, file = saved
    rewritten(file, lambda tensors: None, metadata_of(file) | {"classes": json.dumps(["x"] * 11)})
    with pytest.raises(ValueError, match=r"expected 6\.bias of shape \(11,\), got \(10,\)"):
        Trained(file)
