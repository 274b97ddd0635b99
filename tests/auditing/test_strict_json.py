"""JSON that says to a program what it says to a person."""

import json
import math

import pytest

import gramcert
from auditing_networks import residual_network
from gramcert.auditing.strict_json import canonical, parse
from gramcert.auditing.verifying import read_certificate
from gramcert.auditing.written import BadCertificate


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]', "NaN", "[Infinity]", "-Infinity", "1e999", "-1e999"),
        *("1.50", "1E5", "1.5e0", "-0", "0.99999999999999999999", "1e-400", "1e2", "1_0", "01", '"\n"', "[1,]", ""),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(text):
    with pytest.raises(ValueError, match=r"twice|as Python writes it|finite number|line 1"):
        parse(text)


@pytest.mark.parametrize("value", [{"a": [1, 1.0, True, None, "x"]}, 0.1, 1e-7, 5e-324, 1e308, -3, 2**70, 1e22])
def test_what_python_writes_is_read_back(value):
    assert canonical(parse(json.dumps(value))) == canonical(value)


def test_numbers_of_other_types_have_other_texts():
    assert len({canonical(value) for value in (1, 1.0, True, "1", -1, [1])}) == 6
    with pytest.raises(ValueError, match="float"):
        canonical([math.nan])


def test_certificates_are_read_strictly(tmp_path):
    model, path = residual_network(), tmp_path / "certificate.json"
    text = json.dumps(gramcert.audit(model, (3, 8, 8)).certificate)
    path.write_text(text)
    assert gramcert.verify(path, model).holds
    for before, after in (('"upper": 1', '"upper": 0.5, "upper": 1'), ('"tol": 0.001', '"tol": 0.0010')):
        assert before in text
        path.write_text(text.replace(before, after, 1))
        with pytest.raises(BadCertificate, match=r"certificate.json: cannot be read as JSON \((the name|expected)"):
            read_certificate(path)


def test_certificates_in_memory_are_taken_as_the_json_that_they_are():
    model = residual_network()
    good = gramcert.audit(model, (3, 8, 8)).certificate
    for odd in (math.nan, math.inf, {1}, object()):
        assert not gramcert.verify(good | {"upper": odd}, model).holds
    assert not gramcert.verify(good | {1: 2}, model).holds
    endless = []
    endless.append(endless)
    assert not gramcert.verify(good | {"graph": endless}, model).holds
