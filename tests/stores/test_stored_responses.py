"""What comes out of a row: read strictly."""

from __future__ import annotations

import orjson
import pytest

from oncekey.core.record import StoredResponse
from oncekey.errors import StoreError
from oncekey.stores.sql.key_rows import stored_response


@pytest.mark.parametrize("headers", ['["ab"]', '{"ab": 1}', '[["a", 5]]', '[["a"]]', "null", "[", '"ab"', None, 5, []])
def test_headers_that_are_no_list_of_pairs(headers: object) -> None:
    """Each was once read as something: ``["ab"]`` as the header ``a`` with the value ``b``."""
    with pytest.raises(StoreError, match="headers of a row are damaged"):
        stored_response(201, headers, b"", 1)


@pytest.mark.parametrize("length", [1, 10_000])
def test_headers_are_read_whole(length: int) -> None:
    pairs = (("content-type", "text/plain"), ("location", "/" + "x" * length))
    assert stored_response(201, orjson.dumps(pairs).decode(), b"body", 1) == StoredResponse(201, pairs, b"body")
