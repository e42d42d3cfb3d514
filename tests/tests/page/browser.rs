//! A headless Chromium, by WebDriver.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fantoccini::error::CmdError;
use fantoccini::wd::{Capabilities, WebDriverCompatibleCommand};
use fantoccini::{Client, ClientBuilder};
use http::Method;
use hyper_util::client::legacy::connect::HttpConnector;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::time::Instant;
use url::{ParseError, Url};

/// For anything that the page shows by itself.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) struct Browser {
    driver: Child,
    pub(crate) client: Client,
}

/// A command of chromedriver's own, below the session.
#[derive(Debug)]
struct OfChromium(&'static str, Value);

impl WebDriverCompatibleCommand for OfChromium {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, ParseError> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.0))
    }

    fn method_and_body(&self, _: &Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.1.to_string()))
    }
}

impl Browser {
    /// Starts it, or says what is missing.
    pub(crate) async fn start() -> Result<Self, String> {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .process_group(0)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("chromedriver: {error} (Debian package chromium-driver)"))?;
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines().map_while(Result::ok);
        let started = lines.find_map(|line| {
            line.strip_suffix('.')?
                .split_once("started successfully on port ")
                .map(|(_, port)| port.to_owned())
        });
        // It ends where nobody reads on.
        std::thread::spawn(move || lines.for_each(drop));
        let address = format!("http://127.0.0.1:{}", started.expect("chromedriver names its port"));
        let arguments = [
            "--headless=new",
            // Of root, in a container.
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            // What a page names elsewhere is not found, and neither is the browser's own.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--disable-background-networking",
        ];
        let capabilities = json!({
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            // What is below is no fault of a page.
            "goog:loggingPrefs": {"browser": "WARNING"},
            "timeouts": {"script": 120_000},
        });
        let Value::Object(capabilities) = capabilities else { unreachable!("it is an object") };
        let capabilities: Capabilities = capabilities;
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&address)
            .await
            .map_err(|error| format!("Chromium: {error} (Debian package chromium)"));
        match client {
            Ok(client) => Ok(Self { driver, client }),
            Err(error) => {
                let _ = driver.kill();
                Err(error)
            }
        }
    }

    /// The value of an expression in the page.
    pub(crate) async fn value(&self, expression: &str) -> Value {
        self.client.execute(&format!("return {expression};"), Vec::new()).await.unwrap()
    }

    /// Waits until an expression is what it should be.
    pub(crate) async fn until(&self, expression: &str, wanted: Value) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let value = self.value(expression).await;
            if value == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "{expression} is {value}, not {wanted}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn of_chromium(&self, command: &'static str, body: Value) -> Result<Value, CmdError> {
        self.client.issue_cmd(OfChromium(command, body)).await
    }

    /// As on a screen of this size and with these colours, `light` or `dark`.
    pub(crate) async fn look(&self, width: u32, height: u32, scheme: &str) {
        let cdp = |cmd: &str, params: Value| {
            self.of_chromium("goog/cdp/execute", json!({"cmd": cmd, "params": params}))
        };
        // The window of a headless browser is no narrower than 500.
        let metrics =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        cdp("Emulation.setDeviceMetricsOverride", metrics).await.unwrap();
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        cdp("Emulation.setEmulatedMedia", media).await.unwrap();
    }

    /// What the page and the browser have written to the console since the last call.
    pub(crate) async fn console(&self) -> Vec<Value> {
        let log = self.of_chromium("se/log", json!({"type": "browser"})).await.unwrap();
        log.as_array().cloned().unwrap_or_default()
    }

    /// What axe finds fault with: rule and place of each.
    pub(crate) async fn axe(&self, library: &Path) -> Vec<String> {
        let library = std::fs::read_to_string(library).unwrap();
        let run = format!(
            "const done = arguments[0]; {library}; axe.run().then((found) => done(found.violations), (error) => done(String(error)));"
        );
        let found = self.client.execute_async(&run, Vec::new()).await.unwrap();
        let found = found.as_array().unwrap_or_else(|| panic!("{found}"));
        let places = |rule: &Value| {
            rule["nodes"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|node| node["html"].to_string())
                .collect::<Vec<_>>()
        };
        found.iter().map(|rule| format!("{}: {}: {:?}", rule["id"], rule["help"], places(rule))).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // With Chromium, which is in its process group.
        let group = Pid::from_raw(self.driver.id().cast_signed());
        let _ = killpg(group, Signal::SIGKILL);
        let _ = self.driver.wait();
    }
}
