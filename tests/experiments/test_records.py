import csv
import json

import pytest

from gramcert.experiments.records import Records


def test_rows_are_kept_as_json_and_csv_and_found_again(tmp_path):
    records = Records(tmp_path / "new", "name", {"size": (1, 2)})
    records.add([{"a": 1, "b": None}])
    records.add([{"a": 2, "b": 0.5}], lambda rows: [{"count": len(rows)}])
    again = Records(tmp_path / "new", "name", {"size": (1, 2)})
    assert again.rows == [{"a": 1, "b": None}, {"a": 2, "b": 0.5}]
    assert again.has(a=2)
    assert again.has(a=2, b=0.5)
    assert not again.has(a=2, b=None)
    assert json.loads(records.path(".json").read_text())["summary"] == [{"count": 2}]
    with records.path(".csv").open() as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "0.5"}]


def test_rows_of_several_processes_are_all_kept(tmp_path):
    first, second = (Records(tmp_path, "name", {}) for _ in range(2))
    first.add([{"a": 1}])
    second.add([{"a": 2}])
    first.add([{"a": 3}])
    assert first.rows == Records(tmp_path, "name", {}).rows == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_rows_of_other_settings_are_not_mixed(tmp_path):
    Records(tmp_path, "name", {"epochs": 1}).add([{"a": 1}])
    with pytest.raises(ValueError, match="holds rows of other settings, epochs=1; choose"):
        Records(tmp_path, "name", {"epochs": 2})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": {}}', "no json"])
def test_files_that_are_something_else_are_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "name.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="expected the rows of name"):
        Records(tmp_path, "name", {})
    assert path.read_text() == content


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="not a folder that can be written"):
        Records(tmp_path / "file", "name", {})
