"""What comes out of a row: read strictly, each time, also where the same text was read before."""

from __future__ import annotations

import orjson
import pytest

from oncekey.core.record import StoredResponse
from oncekey.errors import StoreError
from oncekey.stores.stored_responses import REMEMBERED_LENGTH, _remembered_headers, stored_response


@pytest.mark.parametrize("headers", ['["ab"]', '{"ab": 1}', '[["a", 5]]', '[["a"]]', "null", "[", '"ab"', None, 5, []])
def test_headers_that_are_no_list_of_pairs(headers: object) -> None:
    """Each was once read as something: ``["ab"]`` as the header ``a`` with the value ``b``. The second look is not
    answered from memory."""
    for _ in range(2):
        with pytest.raises(StoreError, match="headers of a row are damaged"):
            stored_response(201, headers, b"", 1)


@pytest.mark.parametrize(("length", "remembered"), [(1, 1), (REMEMBERED_LENGTH, 0), (10 * REMEMBERED_LENGTH, 0)])
def test_headers_are_read_whole_whatever_their_length(length: int, remembered: int) -> None:
    """Short ones from memory from the second time on, long ones (a client could fill the memory with them) never."""
    pairs = (("content-type", "text/plain"), ("location", "/" + "x" * length))
    text = orjson.dumps(pairs).decode()
    _remembered_headers.cache_clear()
    for _ in range(2):
        assert stored_response(201, text, b"body", 1) == StoredResponse(201, pairs, b"body")
    assert _remembered_headers.cache_info().hits == _remembered_headers.cache_info().currsize == remembered
