//! The program itself, as a process: start, a review over TLS, policy reload, drain, second signal.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use tokio::net::TcpStream;

const POLICY: &str = r#"
apiVersion: gpu-migrate.io/v1alpha1
kind: GPUMigration
metadata: {name: p}
spec: {project: p, mode: Enforce}
---
apiVersion: v1
kind: Namespace
metadata: {name: default, labels: {gpu-migrate.io/opt-in: "true", gpu-migrate.io/project: p}}
"#;

struct Program {
    child: Child,
    bind: SocketAddr,
    status: SocketAddr,
    folder: tempfile::TempDir,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn command(folder: &Path, bind: SocketAddr, status: SocketAddr) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-migrate-webhook"));
    command
        .args(["--bind", &bind.to_string(), "--metrics-bind", &status.to_string(), "--log-format", "json"])
        .arg("--policy-file")
        .arg(folder.join("policy.yaml"))
        .arg("--tls-dir")
        .arg(folder.join("tls"))
        .env_remove("KUBECONFIG")
        .stderr(Stdio::piped());
    command
}

impl Program {
    async fn start(more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("policy.yaml"), POLICY).unwrap();
        let (bind, status) = (free_port(), free_port());
        let child = command(folder.path(), bind, status).args(more).spawn().unwrap();
        let program = Self { child, bind, status, folder };
        for _ in 0..300 {
            if program.probe("/readyz").await.is_some_and(|(code, _)| code == 200) {
                return program;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("not ready");
    }

    async fn probe(&self, path: &str) -> Option<(u16, String)> {
        let stream = TcpStream::connect(self.status).await.ok()?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.ok()?;
        tokio::spawn(connection);
        let request = http::Request::get(path).header("host", "x").body(Full::new(Bytes::new())).unwrap();
        let response = sender.send_request(request).await.ok()?;
        let code = response.status().as_u16();
        let body = response.into_body().collect().await.ok()?.to_bytes();
        Some((code, String::from_utf8_lossy(&body).into_owned()))
    }

    /// One review on a connection of its own; whether the server asked for the connection to be closed.
    async fn review(&self) -> Result<(Value, bool), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(self.folder.path().join("tls/ca.crt")).unwrap() {
            roots.add(certificate.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let tcp = TcpStream::connect(self.bind).await.map_err(|e| text(&e))?;
        let stream = tokio_rustls::TlsConnector::from(Arc::new(tls))
            .connect(ServerName::try_from("localhost").unwrap(), tcp)
            .await
            .map_err(|e| text(&e))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| text(&e))?;
        tokio::spawn(connection);
        let body = include_bytes!("captures/deployment.json");
        let request = http::Request::post("/mutate?timeout=5s")
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from_static(body)))
            .unwrap();
        let response = sender.send_request(request).await.map_err(|e| text(&e))?;
        let close = response.headers().get("connection").is_some_and(|value| value == "close");
        let body = response.into_body().collect().await.map_err(|e| text(&e))?.to_bytes();
        Ok((serde_json::from_slice(&body).map_err(|e| text(&e))?, close))
    }

    fn signal(&self) {
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    async fn ended(&mut self) -> Option<i32> {
        for _ in 0..300 {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("still running");
    }
}

#[tokio::test]
async fn it_serves_follows_its_policy_file_and_drains() {
    let mut program = Program::start(&["--drain-delay", "3s"]).await;
    let (answer, close) = program.review().await.unwrap();
    assert_eq!(answer["response"]["patchType"], "JSONPatch");
    assert!(!close);
    assert_eq!(program.probe("/livez").await.unwrap().0, 200);
    let metrics = program.probe("/metrics").await.unwrap().1;
    assert!(metrics.contains("gpu_migrate_webhook_reviews_total{outcome=\"converted\"} 1"), "{metrics}");

    std::fs::write(program.folder.path().join("policy.yaml"), POLICY.replace("Enforce", "Off")).unwrap();
    let mut off = false;
    for _ in 0..300 {
        off = program.review().await.unwrap().0["response"].get("patch").is_none();
        if off {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(off, "the changed policy is in force");

    program.signal();
    let mut leaving = false;
    for _ in 0..100 {
        leaving = program
            .probe("/readyz")
            .await
            .is_some_and(|(code, text)| (code, text.as_str()) == (503, "leaving\n"));
        if leaving {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(leaving, "not ready first");
    let (_, close) = program.review().await.expect("still accepting while endpoints propagate");
    assert!(close, "but asking for the connection to be closed");
    assert_eq!(program.ended().await, Some(0), "a clean end");
}

#[tokio::test]
async fn with_a_client_ca_only_its_clients_are_answered() {
    let open = Program::start(&[]).await;
    assert!(open.review().await.is_ok());
    let ca = open.folder.path().join("tls/ca.crt");
    let closed = Program::start(&["--client-ca-file", ca.to_str().unwrap()]).await;
    assert!(closed.review().await.is_err(), "a client without a certificate is turned away");
    assert_eq!(closed.probe("/livez").await.unwrap().0, 200, "probes come without a certificate");
}

#[tokio::test]
async fn a_second_signal_aborts() {
    let mut program = Program::start(&["--drain-delay", "600s"]).await;
    program.signal();
    for _ in 0..100 {
        if program.probe("/readyz").await.is_some_and(|(code, _)| code == 503) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    program.signal();
    assert_eq!(program.ended().await, Some(130), "an abort is no success");
}

#[tokio::test]
async fn the_ca_of_a_folder_survives_a_restart() {
    let mut program = Program::start(&["--drain-delay", "10ms"]).await;
    let before = std::fs::read(program.folder.path().join("tls/ca.crt")).unwrap();
    program.signal();
    assert_eq!(program.ended().await, Some(0));
    program.child = command(program.folder.path(), program.bind, program.status).spawn().unwrap();
    let mut answered = Err(String::new());
    for _ in 0..100 {
        answered = program.review().await;
        if answered.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    answered.unwrap();
    assert_eq!(std::fs::read(program.folder.path().join("tls/ca.crt")).unwrap(), before);
}

#[test]
fn a_bad_start_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    for (policy, expected) in [
        (None, "policy.yaml"),
        (Some("kind: Pod\napiVersion: v1"), "document 1: kind \"Pod\""),
        (Some(&*POLICY.replace("project: p,", "projct: p,")), "spec"),
        (
            Some(&*POLICY.replace("mode: Enforce", "rollout: {percent: 400}")),
            "spec.rollout.percent: 400: expected 0 to 100",
        ),
    ] {
        if let Some(text) = policy {
            std::fs::write(folder.path().join("policy.yaml"), text).unwrap();
        }
        let mut child = command(folder.path(), free_port(), free_port()).spawn().unwrap();
        let mut output = String::new();
        child.stderr.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(!child.wait().unwrap().success());
        assert!(output.contains(expected), "{output}");
    }
}
