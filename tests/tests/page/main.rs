//! The status page in a real browser: what the demo shows there, to whom it can be read, and a thousand nodes.
//!
//! `GPU_MIGRATE_SCREENSHOTS=docs cargo test -p gpu-migrate-tests --test page` also writes the pictures of the documents.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

mod browser;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use browser::Browser;
use fantoccini::Locator;
use fantoccini::key::Key;
use futures::StreamExt as _;
use gpu_migrate_demo::{self as demo, DemoArgs};
use gpu_migrate_model::crd::GPUShadow;
use gpu_migrate_operator::status::access::Access;
use gpu_migrate_operator::status::{feed, router, view};
use gpu_migrate_runtime::watch::Update;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// What checks contrast, names and structure; `.ci/run` gets it from npm.
const AXE: &str = "axe-core-4.14.1/package/axe.min.js";
const DESKTOP: (u32, u32) = (1280, 960);
const PHONE: (u32, u32) = (390, 844);

/// The browser and axe, or a visible skip.
async fn tools() -> Option<(Browser, PathBuf)> {
    let missing = |why: String| {
        gpu_migrate_tests::skipped(&why);
        None
    };
    let axe = gpu_migrate_tests::cache().map(|cache| cache.join(AXE)).filter(|file| file.exists());
    let Some(axe) = axe else { return missing(format!("no {AXE} below the cache: see .ci/run")) };
    match Browser::start().await {
        Ok(browser) => Some((browser, axe)),
        Err(why) => missing(why),
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

async fn until_served(address: &str) {
    for _ in 0..600 {
        if tokio::net::TcpStream::connect(address).await.is_ok() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("nothing at {address}");
}

async fn screenshot(browser: &Browser, name: &str) {
    let Some(folder) = std::env::var_os("GPU_MIGRATE_SCREENSHOTS") else { return };
    // The current folder of a test is its package's.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder);
    std::fs::write(folder.join(name), browser.client.screenshot().await.unwrap()).unwrap();
}

const CARDS: &str = "[...document.querySelectorAll('#nodes .card')]";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_follows_the_demo_to_its_end() {
    let Some((browser, axe)) = tools().await else { return };
    let status_port = free_port();
    let address = format!("127.0.0.1:{status_port}");
    let running =
        // At its own pace: the page shows what lasts for a second or two.
        tokio::spawn(demo::run(DemoArgs { keep: true, status_port, ..DemoArgs::default() }));
    until_served(&address).await;
    browser.look(DESKTOP.0, DESKTOP.1, "light").await;
    browser.client.goto(&format!("http://{address}/")).await.unwrap();
    // Whatever comes is drawn into this page, which is not loaded again.
    browser.client.execute("window.loadedOnce = true;", Vec::new()).await.unwrap();
    let with = |state: &str| format!("{CARDS}.filter((card) => card.classList.contains('{state}')).length");
    browser.until(&format!("{CARDS}.length"), json!(13)).await;
    browser.until(&with("legacy"), json!(8)).await;
    browser.until("document.querySelector('#projects')?.textContent.includes('Complete')", json!(true)).await;
    // vision/detect stays legacy; danlu's six and the six notebooks share.
    browser.until(&with("legacy"), json!(2)).await;
    let holders = format!(
        "{CARDS}.filter((card) => card.classList.contains('shared')).flatMap((card) => card.ariaLabel.match(/[a-z]+\\/[a-z]+-[^,;]+/g)).length"
    );
    browser.until(&holders, json!(12)).await;
    browser.until("document.getElementById('live').textContent", json!("live")).await;
    assert_eq!(browser.value("window.loadedOnce").await, true);
    for reason in ["WaveStarted", "WaveFailed", "Complete"] {
        browser
            .until(
                &format!("document.querySelector('#events').textContent.includes('{reason}')"),
                json!(true),
            )
            .await;
    }

    by_keyboard(&browser).await;
    filtered(&browser).await;
    browser
        .client
        .execute("document.querySelector('#nodes .card.shared').click();", Vec::new())
        .await
        .unwrap();
    for scheme in ["light", "dark"] {
        for (width, height) in [PHONE, DESKTOP] {
            browser.look(width, height, scheme).await;
            let overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
            assert_eq!(browser.value(overflow).await, 0, "{scheme}, {width} wide");
            assert_eq!(browser.axe(&axe).await, Vec::<String>::new(), "{scheme}, {width} wide");
        }
        screenshot(&browser, &format!("status-page-{scheme}.png")).await;
    }
    assert_eq!(browser.console().await, Vec::<Value>::new());

    // Both would notice.
    let spoil = "document.querySelector('h1').style.color = '#777'; document.querySelector('h1').style.background = '#888'; console.error('seen');";
    browser.client.execute(spoil, Vec::new()).await.unwrap();
    let found = browser.axe(&axe).await;
    assert!(found.iter().any(|rule| rule.contains("color-contrast")), "{found:?}");
    assert_eq!(browser.console().await.len(), 1);
    assert!(!running.is_finished(), "{:?}", running.await);
}

/// One card can be reached by Tab; the arrow keys go on from there, and what is chosen is told.
async fn by_keyboard(browser: &Browser) {
    let focused = "`${document.activeElement.dataset.node} ${document.activeElement.dataset.card}`";
    browser
        .client
        .execute("document.querySelector('.card[tabindex=\"0\"]').focus();", Vec::new())
        .await
        .unwrap();
    for (key, now) in
        [(Key::Right, "node-a 1"), (Key::Down, "node-b 1"), (Key::End, "node-b 2"), (Key::Home, "node-b 0")]
    {
        let active = browser.client.active_element().await.unwrap();
        active.send_keys(&String::from(char::from(key))).await.unwrap();
        assert_eq!(browser.value(focused).await, now);
        let told = browser.value("document.getElementById('detail').textContent").await;
        assert!(told.as_str().unwrap().contains(&now.replace(' ', " card ")), "{told}");
    }
}

async fn filtered(browser: &Browser) {
    let rows = "[...document.querySelectorAll('.node')].filter((row) => !row.hidden).map((row) => row.dataset.row).join()";
    let filter = browser.client.find(Locator::Css("#filter")).await.unwrap();
    filter.send_keys("vision/detect").await.unwrap();
    let with_detect = browser.value(rows).await;
    assert!(
        !with_detect.as_str().unwrap().is_empty() && with_detect != "node-a,node-b,node-c",
        "{with_detect}"
    );
    filter.clear().await.unwrap();
    browser
        .client
        .execute("document.getElementById('filter').dispatchEvent(new Event('input'));", Vec::new())
        .await
        .unwrap();
    assert_eq!(browser.value(rows).await, "node-a,node-b,node-c");
}

fn node(number: usize) -> GPUShadow {
    let card = |index: usize| {
        let share = |n: usize| json!({"namespace": "team", "pod": format!("pod-{number}-{index}-{n}"), "uid": format!("{number}-{index}-{n}"), "container": "main", "cores": 25, "blocks": 32});
        let holders: Vec<Value> = (0..(number + index) % 4).map(share).collect();
        json!({"uuid": format!("GPU-{number}-{index}"), "minor": index, "memoryMiB": 81920, "model": "NVIDIA-A100-SXM4-80GB",
            "state": if holders.is_empty() { "Free" } else { "Shared" }, "holders": holders})
    };
    serde_json::from_value(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": format!("node-{number}")},
        "spec": {}, "status": {"total": 8, "cards": (0..8).map(card).collect::<Vec<_>>()}}))
    .unwrap()
}

/// 8,000 cards. How long it takes is printed, not judged.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_nodes_are_drawn_and_follow_changes() {
    let Some((browser, _)) = tools().await else { return };
    let (sender, receiver) = futures::channel::mpsc::unbounded();
    let say = |event: Event<GPUShadow>| {
        let guarded = match event {
            Event::Init => Event::Init,
            Event::InitDone => Event::InitDone,
            Event::InitApply(shadow) => Event::InitApply(DeserializeGuard(Ok(shadow))),
            Event::Apply(shadow) => Event::Apply(DeserializeGuard(Ok(shadow))),
            Event::Delete(shadow) => Event::Delete(DeserializeGuard(Ok(shadow))),
        };
        sender.unbounded_send(guarded).unwrap();
    };
    let shown = Arc::new(feed::Feed::new(1));
    tokio::spawn(feed::follow(
        receiver.map(Update::Event),
        shown.clone(),
        feed::Kind::Node,
        |shadow: &GPUShadow| view::node(shadow),
    ));
    say(Event::Init);
    (0..1000).for_each(|number| say(Event::InitApply(node(number))));
    say(Event::InitDone);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let page = router(shown, Access::Everybody, CancellationToken::new());
    tokio::spawn(async move { axum::serve(listener, page).await });

    browser.look(DESKTOP.0, DESKTOP.1, "light").await;
    browser.client.goto(&format!("http://{address}/")).await.unwrap();
    browser.until(&format!("{CARDS}.length"), json!(8000)).await;
    // From the request for the page until all cards are there; then the longest frame of scrolling through all of them.
    let frames =
        "const done = arguments[0], drawn = performance.now(); let last = drawn, longest = 0, left = 120;
        const step = (now) => { longest = Math.max(longest, now - last); last = now; scrollBy(0, 400);
            if (left-- > 0) requestAnimationFrame(step); else done([drawn, longest, scrollY]); };
        requestAnimationFrame((now) => { last = now; requestAnimationFrame(step); });";
    let figures = browser.client.execute_async(frames, Vec::new()).await.unwrap();
    assert!(figures[2].as_f64().unwrap() > 10_000.0, "it has scrolled: {figures}");
    let begin = std::time::Instant::now();
    let mut changed = node(500);
    changed.status.as_mut().unwrap().cards[0].state = gpu_migrate_model::card::CardState::Unhealthy;
    say(Event::Apply(changed));
    browser
        .until("document.querySelector('[data-row=\"node-500\"] .card').className", json!("card unhealthy"))
        .await;
    eprintln!(
        "1,000 nodes: drawn {:.0} ms after the page was asked for, longest of 120 frames of scrolling {:.0} ms, a change is shown after {:.0} ms (gathered for 500)",
        figures[0].as_f64().unwrap(),
        figures[1].as_f64().unwrap(),
        begin.elapsed().as_secs_f64() * 1e3
    );
    assert_eq!(browser.console().await, Vec::<Value>::new());
}
