"""One browser for all tests of the page. Where there is none they are skipped: `make test-page` says how to get it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.page.browser import Browser, Page, browser, chromium

NO_BROWSER = "no Chromium in PATH (Debian, Ubuntu: apt-get install chromium)"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tabs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip(NO_BROWSER)
    async with browser(program, tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def page(tabs: Browser) -> AsyncIterator[Page]:
    found = await tabs.page()
    yield found
    await found.close()
