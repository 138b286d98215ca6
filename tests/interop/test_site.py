"""The site of the documentation in a browser: what a reader clicks works, on a large screen and on a phone.

Chromium and its driver come from the operating system (`apt-get install chromium chromium-driver`), the rest from the extra `site`. No host but
this one is reachable for the browser, so that a request to another server is an error that the test sees. SITE_SCREENSHOTS names a folder
for pictures to look at.
"""

import functools
import html.parser
import http.server
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import urllib.parse

import pytest
import yaml

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
PREFIX = "/accelerate-fork/"  # pages are published below the repository's name, not at the root of a host
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
PHONE = {"width": 375, "height": 740, "deviceScaleFactor": 2, "mobile": True}
SCREENSHOTS = os.environ.get("SITE_SCREENSHOTS")


def skip(reason: str) -> None:
    """Skip where a developer lacks a tool; continuous integration has it, and must not pass without it."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site once, and return its folder."""
    if importlib.util.find_spec("mkdocs") is None:
        skip("mkdocs is not installed: make test-site does it")
    folder = tmp_path_factory.mktemp("site") / PREFIX.strip("/")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Serve the site on a free port of this machine."""
    handler = functools.partial(Quiet, directory=str(site.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def opened():
    """Start the browser once."""
    if not (CHROMIUM and DRIVER):
        skip("no Chromium and chromedriver on the path: apt-get install chromium chromium-driver")
    try:
        from selenium import webdriver
    except ImportError:
        skip("selenium is not installed: make test-site does it")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    # As root, as in containers, Chromium starts without its sandbox only; it opens nothing but our own pages.
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", alone):
        options.add_argument(word)
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    browser.set_page_load_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture
def browser(opened):
    """Return the browser as a reader with a large screen has it."""
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened.set_window_size(1400, 1000)
    return opened


def wait(browser, condition):
    """Wait until a condition on the browser holds, and return what it returned."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(condition)


def found(browser, selector):
    return browser.find_elements("css selector", selector)


def shown(browser, selector):
    """Wait for the first element of this kind that is visible."""
    return wait(browser, lambda b: next((e for e in found(b, selector) if e.is_displayed()), None))


def picture(browser, name):
    if SCREENSHOTS:
        browser.save_screenshot(str(pathlib.Path(SCREENSHOTS, f"{name}.png")))


def complaints(browser):
    """Return what the console has said since the last call, warnings and errors."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def pages(site):
    """Return the addresses of all pages below the site's, redirects omitted."""
    files = [path for path in sorted(site.rglob("*.html")) if 'http-equiv="refresh"' not in path.read_text("utf-8")]
    return [path.relative_to(site).as_posix().removesuffix("index.html") for path in files]


class Links(html.parser.HTMLParser):
    """Collects the places that a page names, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.update(filter(None, (given.get("id"), given.get("name"))))
        self.targets += filter(None, (given.get("href"), given.get("src")))
        if tag == "meta" and given.get("http-equiv") == "refresh":
            self.targets.append(given["content"].split("url=")[1])


def test_no_link_is_dead(site):
    parsed = {path: Links(path.read_text("utf-8")) for path in site.rglob("*.html")}
    assert len(parsed) > 40
    dead = []
    for path, links in parsed.items():
        here = PREFIX + path.relative_to(site).as_posix()
        for target in links.targets:
            parts = urllib.parse.urlsplit(urllib.parse.urljoin(here, target))
            if parts.scheme or parts.netloc:
                continue
            # Without an address of the site, the page for what is not found names its files from the root of the host.
            inside = urllib.parse.unquote(parts.path).removeprefix(PREFIX if path.name != "404.html" else "/")
            file = site / inside.lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            fragment = urllib.parse.unquote(parts.fragment)
            lost = file in parsed and fragment and fragment not in parsed[file].anchors | {"__top"}
            if not file.is_file() or lost:
                dead.append(f"{path.relative_to(site)}: {target}")
    assert not dead, "\n".join(dead)


def tabs() -> list[tuple[str, str]]:
    """Return the tabs of the navigation, each with the title of its second entry: the first may be the page of the tab."""
    sections = yaml.safe_load(
        (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].partition("\nmarkdown_")[0]
    )
    return [(tab, next(iter(pages[1]))) for section in sections for tab, pages in section.items()]


def test_reader_finds_a_page_by_tabs_and_by_search(address, browser):
    browser.get(address)
    picture(browser, "home")
    # The start page last: it is the first step of the tutorial.
    for tab, entry in reversed(tabs()):
        link = next(e for e in found(browser, ".md-tabs__link") if e.text.strip() == tab)
        link.click()
        wait(browser, lambda b, tab=tab: found(b, ".md-tabs__item--active")[0].text.strip() == tab)
        assert entry in shown(browser, ".md-sidebar--primary").text
    # The steps of the tutorial follow each other.
    shown(browser, ".md-footer__link--next").click()
    wait(browser, lambda b: b.current_url.endswith("learn/two-processes/"))
    for word, page in {
        "gradient_accumulation_steps": "gradient",
        "preemption": "resume",
        "ep_size": "experts",
    }.items():
        browser.get(address)
        shown(browser, ".md-search__form" if not found(browser, ".md-search__input:focus") else "body").click()
        shown(browser, ".md-search__input").send_keys(word)
        results = wait(browser, lambda b: found(b, ".md-search-result__link"))
        assert any(page in result.get_attribute("href") for result in results), word
    picture(browser, "search")
    results[0].click()
    wait(browser, lambda b: b.current_url.split("?")[0].rstrip("/") != address.rstrip("/"))
    assert "ep_size" in shown(browser, "article").text
    assert not complaints(browser)


def test_code_can_be_copied_and_the_palette_changed(address, browser):
    browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    browser.get(address + "learn/two-processes/")
    blocks = wait(browser, lambda b: found(b, "article div.highlight"))
    buttons = wait(browser, lambda b: found(b, "article div.highlight button[data-md-type=copy]"))
    assert len(buttons) >= len(blocks) > 0
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", buttons[0])
    buttons[0].click()  # as a reader does: the browser gives the clipboard to nothing less
    assert "Copied" in shown(browser, ".md-dialog").text
    copied = wait(browser, lambda b: b.execute_async_script("navigator.clipboard.readText().then(arguments[0])"))
    assert copied.strip() == found(browser, "article div.highlight code")[0].text.strip()
    before = found(browser, "body")[0].get_attribute("data-md-color-scheme")
    shown(browser, "label.md-header__button[for^=__palette]").click()
    wait(browser, lambda b: found(b, "body")[0].get_attribute("data-md-color-scheme") != before)
    picture(browser, "other-palette")
    assert not complaints(browser)


def test_each_page_fits_a_phone_and_says_nothing_in_the_console(site, address, browser):
    """Tables and code may scroll within themselves; the page may not."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    wrong = []
    for page in pages(site):
        if page == "404.html":
            continue
        browser.get(address + page)
        wait(browser, lambda b: b.execute_script("return document.readyState") == "complete")
        width, room = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        if max(width, room) > PHONE["width"]:
            wrong.append(f"{page}: {max(width, room)} pixels wide on a phone of {PHONE['width']}")
        broken = "return [...document.images].filter(i => i.complete && !i.naturalWidth && i.loading != 'lazy').map(i => i.src)"
        wrong += [f"{page}: picture {source} is broken" for source in browser.execute_script(broken)]
        wrong += [f"{page}: {line}" for line in complaints(browser)]
        if page in ("", "guides/fsdp/", "differences/"):
            picture(browser, "phone-" + (page.strip("/").replace("/", "-") or "home"))
    assert not wrong, "\n".join(wrong)
