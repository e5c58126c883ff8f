"""One engine of the trained model for the whole room."""

from __future__ import annotations

import pytest

from tests.support.engines import make_llm


@pytest.fixture(scope="session")
def llm():
    """The default engine over the bundled trained model: asynchronous steps, five drafts."""
    with make_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def tokenizer(llm):
    return llm.get_tokenizer()
