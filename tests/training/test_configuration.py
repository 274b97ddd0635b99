import dataclasses
import json
import math

import pytest

from gramcert.training.augmentation import Augmentation
from gramcert.training.configuration import CONFIGURATIONS, Configuration, from_json, named

# Every field: how another value of it is written, and that value.
OVERRIDES = {
    "name": ("3", "3"),
    "dataset": ("folder", "folder"),
    "images": ("100", 100),
    "holdout": ("7", 7),
    "unshuffle": ("2", 2),
    "widths": ("24", (24,)),
    "blocks": ("0", (0,)),
    "inner": ("8", (8,)),
    "kernel": ("5", 5),
    "pool": ("1", 1),
    "dense_blocks": ("0", 0),
    "dense_inner": ("64", 64),
    "activation": ("leaky_relu", "leaky_relu"),
    "rescaling": ("sn", "sn"),
    "form": ("spatial", "spatial"),
    "iterations": ("none", None),
    "start": ("orthogonal", "orthogonal"),
    "loss": ("annealing", "annealing"),
    "offset": ("-1", -1.0),
    "temperature": ("1e-1", 0.1),
    "epochs": ("3", 3),
    "batch": ("32", 32),
    "lr": ("1", 1.0),
    "final_lr": ("0", 0.0),
    "knots": ("0.5,0.5", (0.5, 0.5)),
    "betas": ("0,0.99", (0.0, 0.99)),
    "augmentation.crop": ("2", 2),
    "augmentation.flip": ("True", True),
    "augmentation.brightness": ("0.5,1", (0.5, 1.0)),
    "augmentation.contrast": ("0,2", (0.0, 2.0)),
    "augmentation.saturation": ("1,1.5", (1.0, 1.5)),
    "augmentation.hue": ("0.5", 0.5),
    "precision": ("bfloat16", "bfloat16"),
    "evaluate_every": ("4", 4),
    "seed": (str(2**63 - 1), 2**63 - 1),
}
BASE = dataclasses.replace(named("digits"), temperature=0.2)


def changed(name, value):
    if name.startswith("augmentation."):
        colours = dataclasses.replace(BASE.augmentation, **{name.removeprefix("augmentation."): value})
        return dataclasses.replace(BASE, augmentation=colours)
    more = {"iterations": None, "form": "spatial"} if name == "rescaling" else {}
    return dataclasses.replace(BASE, **{name: value} | more)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_another_rescaling_brings_its_own_iterations_and_form(name):
    for rescaling, form in (("aol", "spatial"), ("sn", "spatial"), ("sr", named(name).form)):
        found = named(name).with_fields({"rescaling": rescaling})
        assert (found.rescaling, found.iterations, found.form) == (rescaling, None, form)
    chosen = named(name).with_fields({"iterations": "7", "form": "frequency", "rescaling": "sr"})
    assert (chosen.iterations, chosen.form) == (7, "frequency")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rescaling": "aol", "iterations": "2"}, "iterations=2, expected 1, which is what aol is"),
        ({"rescaling": "aol", "form": "frequency"}, "form=frequency, expected spatial, the only form of aol"),
        ({"rescaling": "sn", "form": "frequency"}, "form=frequency, expected spatial, the only form of sn"),
    ],
)
def test_rescalings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        BASE.with_fields(changes)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_named_configurations_survive_json(name):
    configuration = named(name)
    assert configuration.name == name
    assert from_json(configuration.to_json()) == configuration
    fields = json.loads(configuration.to_json())
    assert fields.keys() == {field.name for field in dataclasses.fields(Configuration)}


def test_the_overrides_below_are_of_every_field():
    own = {field.name for field in dataclasses.fields(Configuration)} - {"augmentation"}
    assert OVERRIDES.keys() == own | {f"augmentation.{field.name}" for field in dataclasses.fields(Augmentation)}


@pytest.mark.parametrize(("name", "text", "value"), [(name, *override) for name, override in OVERRIDES.items()])
def test_a_field_is_overridden_by_its_text_and_no_other_changes(name, text, value):
    assert changed(name, value) != BASE
    result = BASE.with_fields({name: text})
    assert result == changed(name, value)
    assert from_json(result.to_json()) == result


def test_several_overrides_at_once():
    result = BASE.with_fields({"widths": "16,64", "blocks": "1,2", "inner": "8,4", "augmentation.crop": "1"})
    assert (result.widths, result.blocks, result.inner) == ((16, 64), (1, 2), (8, 4))
    assert result.augmentation == Augmentation(crop=1)
    assert BASE.with_fields({}) == BASE


def test_json_may_leave_out_what_has_a_default():
    fields = {"name": "own", "dataset": "digits", "widths": [4], "blocks": [1], "inner": [2]}
    fields |= {"dense_blocks": 1, "dense_inner": 3, "epochs": 5}
    result = from_json(json.dumps(fields))
    assert (result.widths, result.epochs, result.augmentation) == ((4,), 5, Augmentation())
    assert result.offset == 1.5 * math.sqrt(2)
    for name in fields:
        with pytest.raises(ValueError, match=f"^Configuration: '{name}' is missing$"):
            from_json(json.dumps({key: value for key, value in fields.items() if key != name}))


def test_nothing_can_be_assigned():
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'seed'"):
        BASE.seed = 1


def test_unknown_name():
    with pytest.raises(ValueError, match=r"configuration 'cifar10-XS': expected one of digits, .*, or a JSON file"):
        named("cifar10-XS")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("epoch", "3", "unknown field 'epoch', expected one of name, dataset"),
        ("", "3", "unknown field ''"),
        ("__class__", "3", "unknown field '__class__'"),
        ("augmentation", "3", r"augmentation='3'\): expected a dictionary"),
        ("augmentation.", "3", r"unknown field 'augmentation\.'"),
        ("augmentation.zoom", "3", r"unknown field 'augmentation\.zoom', expected one of crop, flip"),
        ("seed.crop", "3", r"unknown field 'seed\.crop'"),
        ("epochs", "many", r"epochs='many'\): expected a valid integer"),
        ("epochs", "", r"epochs=''\): expected a valid integer"),
        ("epochs", "1.5", r"epochs='1\.5'\): expected a valid integer"),
        ("epochs", "true", r"epochs='true'\): expected a valid integer"),
        ("epochs", "none", r"epochs=None\): expected a valid integer"),
        ("epochs", "1,2", r"epochs='1,2'\): expected a valid integer"),
        ("epochs", "9" * 5000, r"epochs='999.*9'\): Unable to parse input string as an integer"),
        ("images", "all", r"images='all'\): expected a valid integer"),
        ("lr", "fast", r"lr='fast'\): expected a valid number"),
        ("widths", "", r"widths\.0=''\): expected a valid integer"),
        ("widths", "4,x", r"widths\.1='x'\): expected a valid integer"),
        ("knots", "0.5", r"'knots\.1' is missing"),
        ("knots", "0.1,0.2,0.3", r"knots=.*: Tuple should have at most 2 items"),
        ("augmentation.flip", "2", r"augmentation\.flip='2'\): expected a valid boolean"),
        ("dataset", "mnist", r"dataset='mnist'\): expected 'digits', 'cifar10', 'cifar100' or 'folder'"),
        ("rescaling", "1", r"rescaling='1'\): expected 'sr', 'aol' or 'sn'"),
        ("epochs", "0", r"epochs='0'\): expected greater than 0"),
        ("batch", "-1", r"batch='-1'\): expected greater than 0"),
        ("images", "0", r"images='0'\): expected greater than 0"),
        ("holdout", "-1", r"holdout='-1'\): expected greater than or equal to 0"),
        ("seed", "-1", r"seed='-1'\): expected greater than or equal to 0"),
        ("seed", str(2**63), "expected less than or equal to 9223372036854775807"),
        ("kernel", "4", r"kernel='4'\): expected an odd number"),
        ("kernel", "-3", "expected greater than 0"),
        ("widths", "4,8", r"blocks=\(4,\), expected 2 numbers, as widths has"),
        ("inner", "4,8", r"inner=\(4, 8\), expected 1 numbers, as widths has"),
        ("widths", "0", r"widths\.0='0'\): expected greater than 0"),
        ("inner", "0", r"inner\.0='0'\): expected greater than 0"),
        ("blocks", "-1", "expected greater than or equal to 0"),
        ("blocks", "1001", "expected 0 to 1000 in all"),
        ("dense_blocks", "1001", "expected less than or equal to 1000"),
        ("iterations", "0", r"iterations='0'\): expected greater than 0"),
        ("temperature", "0", r"temperature='0'\): expected greater than 0"),
        ("lr", "nan", r"lr='nan'\): expected a finite number"),
        ("lr", "1e999", r"lr='1e999'\): expected a finite number"),
        ("lr", "1" + "0" * 400, r"lr='1000.*0'\): expected a finite number"),
        ("offset", "-1" + "0" * 400, r"offset='-1000.*0'\): expected a finite number"),
        ("lr", "1e300", r"lr='1e300'\): expected less than or equal to 10{38}"),
        ("final_lr", "-1", "expected greater than or equal to 0"),
        ("final_lr", "1e300", "expected less than or equal to 10{38}"),
        ("kernel", "1001", "expected less than or equal to 999"),
        ("iterations", "101", "expected less than or equal to 100"),
        ("knots", "0,0.5", "expected greater than 0"),
        ("knots", "0.5,1", "expected less than 1"),
        ("knots", "0.5,0.4", "expected two increasing numbers"),
        ("betas", "0.5,1", r"betas\.1='1'\): expected less than 1"),
        ("betas", "nan,0.9", r"betas\.0='nan'\): expected a finite number"),
        ("augmentation.crop", "-1", r"augmentation\.crop='-1'\): expected greater than or equal to 0"),
        ("augmentation.hue", "0.6", "expected less than or equal to 0.5"),
        ("augmentation.contrast", "2,1", r"augmentation\.contrast=\['2', '1'\]\): expected two increasing numbers"),
        ("augmentation.brightness", "-1,1", "expected greater than or equal to 0"),
        ("augmentation.saturation", "1,inf", "expected a finite number"),
    ],
)
def test_bad_overrides(name, text, message):
    with pytest.raises(ValueError, match=f"^Configuration.*{message}") as error:
        BASE.with_fields({name: text})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "unknown field 'speed'"),
        ({"epochs": "3"}, r"epochs='3'\): expected a valid integer"),
        ({"epochs": [3]}, r"epochs=\[3\]\): expected a valid integer"),
        ({"epochs": None}, r"epochs=None\): expected a valid integer"),
        ({"epochs": True}, r"epochs=True\): expected a valid integer"),
        ({"epochs": 3.0}, r"epochs=3\.0\): expected a valid integer"),
        ({"name": None}, "expected a valid string"),
        ({"widths": 4}, r"widths=4\): expected a valid array"),
        ({"widths": {"4": 4}}, "expected a valid array"),
        ({"widths": [], "blocks": [], "inner": []}, r"widths=\[\]\): Tuple should have at least 1 item"),
        ({"widths": [[4]]}, r"widths\.0=\[4\]\): expected a valid integer"),
        ({"knots": ["0.1", "0.2"]}, r"knots\.0='0\.1'\): expected a valid number"),
        ({"lr": math.nan}, "expected a finite number"),
        ({"lr": 10**400}, r"lr=1000.*0\): expected a (finite|valid) number"),
        ({"dataset": ["digits"]}, "expected 'digits', 'cifar10'"),
        ({"augmentation": 3}, r"augmentation=3\): expected an object"),
        ({"augmentation": None}, r"augmentation=None\): expected an object"),
        ({"augmentation": {"zoom": 1}}, r"unknown field 'augmentation\.zoom', expected one of crop"),
        ({"augmentation": {"flip": 1}}, r"augmentation\.flip=1\): expected a valid boolean"),
        ({"augmentation": {"crop": 1.5}}, r"augmentation\.crop=1\.5\): expected a valid integer"),
    ],
)
def test_bad_json_fields(change, message):
    text = json.dumps(json.loads(BASE.to_json()) | change)
    with pytest.raises(ValueError, match=f"^Configuration.*{message}"):
        from_json(text)


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "\x00", "[" * 200_000, '{"a":' * 200_000])
def test_text_that_is_not_json(text):
    with pytest.raises(ValueError, match=r"^Configuration: Invalid JSON: "):
        from_json(text)


@pytest.mark.parametrize("text", ["null", "3", "[]", '"digits"'])
def test_json_that_is_not_an_object(text):
    with pytest.raises(ValueError, match=r"^Configuration: expected an object$"):
        from_json(text)


def test_arguments_from_python_are_checked_too():
    with pytest.raises(ValueError, match=r"^Configuration\(epochs=True\): expected a valid integer$"):
        dataclasses.replace(BASE, epochs=True)
    with pytest.raises(ValueError, match=r"^Configuration\(widths=\[4\]\): expected a valid tuple$"):
        dataclasses.replace(BASE, widths=[4])
    with pytest.raises(ValueError, match=r"^Configuration: unknown field 'speed', expected one of name, dataset"):
        dataclasses.replace(BASE, speed=1)
    with pytest.raises(ValueError, match=r"^Configuration: 'name' is missing$"):
        Configuration()
    with pytest.raises(ValueError, match=r"^Augmentation\(hue=0\.6\): expected less than or equal to 0\.5$"):
        Augmentation(hue=0.6)
