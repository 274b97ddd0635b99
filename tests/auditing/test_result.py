"""An audit as JSON."""

import json

from torch import nn

import gramcert


def test_json_has_no_infinity():
    found = gramcert.audit(nn.Hardshrink(), (3,))
    content = json.loads(found.to_json())
    assert content["upper"] == "unbounded"
    assert content["rows"][0]["upper"] == "unbounded"
    assert "certificate" not in content
