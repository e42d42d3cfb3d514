//! Who may call, on the real binary over real TLS: by client certificate, by token.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;

use crate::common::{list, node, shared};

/// The binary, serving TLS with a CA of its own.
struct Extender {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
}

impl Drop for Extender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Extender {
    fn start(folder: tempfile::TempDir, flags: &[&str]) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let snapshot = folder.path().join("cluster.json");
        std::fs::write(&snapshot, list(&[node("a", 2, 16), shared("p", &[(50, 4)])])).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_gpu-migrate-extender"))
            .args(["--metrics-bind", "", "--bind", &format!("127.0.0.1:{port}"), "--tls-dir"])
            .arg(folder.path().join("tls"))
            .arg("--snapshot")
            .arg(snapshot)
            .args(flags)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let extender = Self { child, port, folder };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(start.elapsed() < Duration::from_secs(60), "not serving");
            std::thread::sleep(Duration::from_millis(10));
        }
        extender
    }

    /// Binds pod `p`. The status line and the body, or why there was no connection.
    fn bind(&self, identity: Option<&Identity>, token: Option<&str>) -> std::io::Result<String> {
        let mut roots = RootCertStore::empty();
        let ca = std::fs::read(self.folder.path().join("tls/ca.crt")).unwrap();
        CertificateDer::pem_slice_iter(&ca).for_each(|cert| roots.add(cert.unwrap()).unwrap());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(roots);
        let config = match identity {
            None => config.with_no_client_auth(),
            Some(Identity { cert, key }) => {
                config.with_client_auth_cert(vec![cert.clone()], key.clone_key()).unwrap()
            }
        };
        let name = ServerName::try_from("localhost").unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let socket = TcpStream::connect(("127.0.0.1", self.port))?;
        socket.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut stream = StreamOwned::new(connection, socket);
        let body =
            json!({"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "a"}).to_string();
        let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let head = format!(
            "POST /scheduler/bind HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}Content-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            // The server may close the socket without a word once it has answered.
            Err(error) if answer.is_empty() => Err(error),
            _ => Ok(String::from_utf8(answer).unwrap()),
        }
    }
}

struct Identity {
    cert: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

struct Ca(Issuer<'static, KeyPair>);

impl Ca {
    /// A new CA, and its certificate in PEM.
    fn new() -> (Self, String) {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "the scheduler's CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        (Self(Issuer::new(params, key)), pem)
    }

    fn identity(&self, name: &str) -> Identity {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap().der().clone();
        Identity { cert, key: PrivateKeyDer::try_from(key.serialize_der()).unwrap() }
    }
}

fn write(folder: &Path, name: &str, content: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The connection ends with this alert; or without it, where the server closed before we had sent everything.
#[track_caller]
fn assert_refused(outcome: &std::io::Result<String>, alert: &str) {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    match outcome {
        Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset) => {}
        Err(error) => assert!(error.to_string().contains(alert), "{error}"),
        Ok(answer) => panic!("{answer}"),
    }
}

const BOUND: &str = r#"{"Error":""}"#;

#[test]
fn only_a_client_whose_certificate_the_ca_has_signed_may_bind() {
    let folder = tempfile::tempdir().unwrap();
    let ((ca, pem), (stranger, _)) = (Ca::new(), Ca::new());
    let ca_file = write(folder.path(), "clients.pem", &pem);
    let names = ["--client-ca-file", &ca_file, "--client-names", "system:kube-scheduler"];
    let extender = Extender::start(folder, &names);
    assert_refused(&extender.bind(None, None), "CertificateRequired");
    // The other CA has even the same name.
    assert_refused(&extender.bind(Some(&stranger.identity("system:kube-scheduler")), None), "DecryptError");
    assert_refused(&extender.bind(Some(&ca.identity("somebody")), None), "AccessDenied");
    let answer = extender.bind(Some(&ca.identity("system:kube-scheduler")), None).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(BOUND), "{answer}");
}

#[test]
fn a_token_will_do_where_no_certificate_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let token_file = write(folder.path(), "token", "a-token-that-is-long-enough\n");
    let extender = Extender::start(folder, &["--token-file", &token_file]);
    for token in [None, Some("another-token-of-that-length")] {
        let answer = extender.bind(None, token).unwrap();
        assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    }
    let answer = extender.bind(None, Some("a-token-that-is-long-enough")).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(BOUND), "{answer}");
}

#[test]
fn both_are_needed_where_both_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (ca, pem) = Ca::new();
    let ca_file = write(folder.path(), "clients.pem", &pem);
    let token_file = write(folder.path(), "token", "a-token-that-is-long-enough\n");
    let flags = ["--client-ca-file", &ca_file, "--token-file", &token_file];
    let extender = Extender::start(folder, &flags);
    let identity = ca.identity("whoever");
    let token = Some("a-token-that-is-long-enough");
    assert_refused(&extender.bind(None, token), "CertificateRequired");
    assert!(extender.bind(Some(&identity), None).unwrap().starts_with("HTTP/1.1 401"));
    assert!(extender.bind(Some(&identity), token).unwrap().ends_with(BOUND));
}

#[test]
fn beyond_loopback_it_does_not_start_without_a_check_of_callers() {
    let tls = tempfile::tempdir().unwrap();
    for flags in
        [&["--bind", "0.0.0.0:0"][..], &["--bind", "0.0.0.0:0", "--tls-dir", tls.path().to_str().unwrap()]]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_gpu-migrate-extender")).args(flags).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains("--client-ca-file"), "{told}");
    }
}
