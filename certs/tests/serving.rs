//! The accept loop with real sockets: rotation under load, limits, drain, client certificates.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpu_migrate_certs::authority::Ca;
use gpu_migrate_certs::{Bundle, CertRotator, Certs, ClientAuth, Clock, Lifetimes, Options, Source};
use gpu_migrate_runtime::serve::{Limits, serve};
use http::{Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiff::Timestamp;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const START: i64 = 1_800_000_000;

/// A clock set by hand, for our side and for rustls'.
#[derive(Clone, Debug)]
struct HandClock(Arc<AtomicI64>);

impl HandClock {
    fn new() -> Self {
        Self(Arc::new(AtomicI64::new(START)))
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.0.load(Ordering::SeqCst)).unwrap()
    }

    fn clock(&self) -> Clock {
        let clock = self.clone();
        Arc::new(move || clock.now())
    }
}

impl rustls::time_provider::TimeProvider for HandClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.now().as_second() as u64)))
    }
}

const LIVES: Lifetimes = Lifetimes { ca: Duration::from_secs(30_000), leaf: Duration::from_secs(3000) };

async fn certs(folder: &Path, clock: &HandClock) -> (Certs, CertRotator) {
    let options = Options { owner: "test".into(), names: vec!["localhost".into()], lifetimes: LIVES };
    Certs::start(Source::folder(folder), options, clock.clock()).await.unwrap()
}

/// A server that says hello, and how to stop it.
async fn hello(config: Arc<rustls::ServerConfig>, limits: Limits) -> (SocketAddr, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let service = service_fn(|_: Request<Incoming>| async {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"hello"))))
    });
    tokio::spawn(serve(listener, Some(config), service, limits, stop.clone()));
    (address, stop)
}

type Client = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn client(
    bundle: &Bundle,
    clock: &HandClock,
    identity: Option<Client>,
    alpn: &[&str],
) -> Arc<rustls::ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    for certificate in bundle.certificates() {
        roots.add(certificate).unwrap();
    }
    let builder = rustls::ClientConfig::builder_with_details(provider, Arc::new(clock.clone()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    Arc::new(config)
}

/// One request on a connection of its own; the server's certificate comes back too.
async fn get(
    address: SocketAddr,
    config: Arc<rustls::ClientConfig>,
) -> Result<(String, CertificateDer<'static>), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let tcp = TcpStream::connect(address).await.map_err(|e| text(&e))?;
    let connector = tokio_rustls::TlsConnector::from(config);
    let name = ServerName::try_from("localhost").unwrap();
    let stream = connector.connect(name, tcp).await.map_err(|e| text(&e))?;
    let session = stream.get_ref().1;
    let certificate = session.peer_certificates().unwrap()[0].clone();
    let h2 = session.alpn_protocol() == Some(b"h2");
    let request = Request::get("https://localhost/").body(Empty::<Bytes>::new()).unwrap();
    let response = if h2 {
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .map_err(|e| text(&e))?;
        tokio::spawn(connection);
        sender.send_request(request).await
    } else {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| text(&e))?;
        tokio::spawn(connection);
        sender.send_request(request).await
    };
    let response = response.map_err(|e| text(&e))?;
    let version = response.version();
    response.into_body().collect().await.map_err(|e| text(&e))?;
    Ok((format!("{version:?}"), certificate))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_handshake_fails_while_leafs_and_cas_rotate() {
    let folder = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let (certs, mut rotator) = certs(folder.path(), &clock).await;
    let (address, stop) = hello(certs.server_config(None).unwrap(), Limits::default()).await;
    // A client like the API server: it knows the bundle that was registered a check ago, not the newest one.
    let registered = Arc::new(Mutex::new(certs.bundle().borrow().clone().unwrap()));
    let going = Arc::new(AtomicBool::new(true));
    let handshakes: Vec<_> = (0..2).map(|_| Arc::new(AtomicU64::new(0))).collect();
    let clients: Vec<_> = handshakes
        .iter()
        .map(|done| {
            let (registered, going, clock) = (Arc::clone(&registered), Arc::clone(&going), clock.clone());
            let done = Arc::clone(done);
            tokio::spawn(async move {
                let mut seen = std::collections::HashSet::new();
                let mut failures = Vec::new();
                while going.load(Ordering::SeqCst) {
                    let bundle = registered.lock().unwrap().clone();
                    match get(address, client(&bundle, &clock, None, &[])).await {
                        Ok((_, certificate)) => {
                            seen.insert(certificate.to_vec());
                        }
                        Err(error) => failures.push(error),
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                }
                (seen, failures)
            })
        })
        .collect();
    let mut cas = std::collections::HashSet::new();
    // Three CA lifetimes in steps of a tenth of a leaf's, which is far coarser than in life.
    for step in 0..300 {
        if step % 2 == 0 {
            // On a busy machine a handshake takes long in real time: it must not take hours of the clock's for that.
            for done in &handshakes {
                let before = done.load(Ordering::SeqCst);
                while done.load(Ordering::SeqCst) < before + 2 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        let known = certs.bundle().borrow().clone().unwrap();
        cas.extend(known.certificates().iter().map(|ca| ca.to_vec()));
        *registered.lock().unwrap() = known;
        clock.0.fetch_add(300, Ordering::SeqCst);
        rotator.tick().await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    going.store(false, Ordering::SeqCst);
    let mut leafs = std::collections::HashSet::new();
    for client in clients {
        let (seen, failures) = client.await.unwrap();
        assert_eq!(failures, Vec::<String>::new());
        leafs.extend(seen);
    }
    assert!(leafs.len() >= 10 && cas.len() >= 3, "{} leafs and {} CAs were seen", leafs.len(), cas.len());
    stop.cancel();
}

#[tokio::test]
async fn both_protocols_and_keep_alive() {
    let folder = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let (certs, _rotator) = certs(folder.path(), &clock).await;
    let (address, stop) = hello(certs.server_config(None).unwrap(), Limits::default()).await;
    let bundle = certs.bundle().borrow().clone().unwrap();
    for (alpn, expected) in
        [(&["h2", "http/1.1"][..], "HTTP/2.0"), (&["http/1.1"], "HTTP/1.1"), (&[], "HTTP/1.1")]
    {
        let (version, _) = get(address, client(&bundle, &clock, None, alpn)).await.unwrap();
        assert_eq!(version, expected, "{alpn:?}");
    }
    stop.cancel();
}

/// A client certificate with this common name.
fn identity(ca: &Ca, clock: &HandClock, name: &str) -> Client {
    use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.not_before = std::time::SystemTime::from(clock.now()).into();
    params.not_after = std::time::SystemTime::from(clock.now() + Duration::from_secs(1000)).into();
    let issuer = Issuer::from_ca_cert_der(ca.der(), KeyPair::from_pem(&ca.key_pem()).unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    (vec![certificate.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into()))
}

#[tokio::test]
async fn clients_are_checked_by_ca_and_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let (certs, _rotator) = certs(folder.path(), &clock).await;
    let (ours, foreign) = (
        Ca::generate("ours", clock.now(), &LIVES).unwrap(),
        Ca::generate("foreign", clock.now(), &LIVES).unwrap(),
    );
    let ca_file = folder.path().join("clients.pem");
    std::fs::write(&ca_file, ours.pem()).unwrap();
    let auth = ClientAuth { ca_file: ca_file.clone(), names: vec!["kube-apiserver".into()] };
    let mut config = Arc::unwrap_or_clone(certs.server_config(Some(&auth)).unwrap());
    config.time_provider = Arc::new(clock.clone());
    let (address, stop) = hello(Arc::new(config), Limits::default()).await;
    let bundle = certs.bundle().borrow().clone().unwrap();
    for (who, identity, expected) in [
        ("the API server", Some(identity(&ours, &clock, "kube-apiserver")), true),
        ("another client of the same CA", Some(identity(&ours, &clock, "kubelet")), false),
        ("the right name of another CA", Some(identity(&foreign, &clock, "kube-apiserver")), false),
        ("no certificate", None, false),
    ] {
        let answer = get(address, client(&bundle, &clock, identity, &[])).await;
        assert_eq!(answer.is_ok(), expected, "{who}: {answer:?}");
    }
    // The CA is exchanged, by a rename as a Secret mount does it; half a file would change nothing.
    let accepted = async |ca: &Ca| {
        let identity = identity(ca, &clock, "kube-apiserver");
        get(address, client(&bundle, &clock, Some(identity), &[])).await.is_ok()
    };
    let replace = |text: &str| {
        std::fs::write(folder.path().join("new"), text).unwrap();
        std::fs::rename(folder.path().join("new"), &ca_file).unwrap();
    };
    replace("-----BEGIN");
    assert!(accepted(&ours).await && !accepted(&foreign).await);
    replace(foreign.pem());
    assert!(!accepted(&ours).await && accepted(&foreign).await);
    stop.cancel();
    let missing = ClientAuth { ca_file: folder.path().join("none.pem"), names: vec![] };
    assert!(certs.server_config(Some(&missing)).unwrap_err().to_string().contains("none.pem"));
}

#[tokio::test]
async fn a_silent_client_is_cut_and_a_full_server_serves_on() {
    let folder = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let (certs, _rotator) = certs(folder.path(), &clock).await;
    let limits = Limits { connections: 2, handshake: Duration::from_millis(300), ..Limits::default() };
    let (address, stop) = hello(certs.server_config(None).unwrap(), limits).await;
    let bundle = certs.bundle().borrow().clone().unwrap();
    // Two clients that never say a word hold all the slots, until the handshake limit frees them.
    let mut silent = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    get(address, client(&bundle, &clock, None, &[])).await.unwrap();
    for stream in &mut silent {
        assert_eq!(stream.read(&mut [0; 16]).await.unwrap_or(0), 0, "cut by the server");
    }
    stop.cancel();
}

/// Who holds connections, or sends its headers byte by byte, does not keep a caller out.
#[tokio::test]
async fn idle_and_dribbling_connections_make_room() {
    let folder = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let (certs, _rotator) = certs(folder.path(), &clock).await;
    let limits =
        Limits { connections: 8, per_peer: 4, headers: Duration::from_millis(100), ..Limits::default() };
    let metrics = limits.metrics.clone();
    let (address, stop) = hello(certs.server_config(None).unwrap(), limits).await;
    let bundle = certs.bundle().borrow().clone().unwrap();
    let connector = tokio_rustls::TlsConnector::from(client(&bundle, &clock, None, &[]));
    let connect = async || {
        let tcp = TcpStream::connect(address).await.unwrap();
        connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await.unwrap()
    };
    let mut idle = Vec::new();
    for _ in 0..50 {
        idle.push(connect().await);
    }
    get(address, client(&bundle, &clock, None, &[])).await.unwrap();
    assert_eq!(idle[0].read(&mut [0; 16]).await.unwrap_or(0), 0, "closed by the server");
    assert!(metrics.closed("peer") >= 46, "{}", metrics.closed("peer"));
    let mut dribbling = connect().await;
    dribbling.write_all(b"GET / HT").await.unwrap();
    assert_eq!(dribbling.read(&mut [0; 16]).await.unwrap_or(0), 0, "closed by the server");
    assert!(metrics.closed("slow") >= 1);
    stop.cancel();
}

#[tokio::test]
async fn a_request_in_flight_is_finished_and_a_stuck_one_cut() {
    let folder = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let (certs, _rotator) = certs(folder.path(), &clock).await;
    let bundle = certs.bundle().borrow().clone().unwrap();
    for (released, drain) in [(true, Duration::from_secs(20)), (false, Duration::from_millis(200))] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (arrived, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let service = service_fn({
            let (arrived, release) = (Arc::clone(&arrived), Arc::clone(&release));
            move |_: Request<Incoming>| {
                let (arrived, release) = (Arc::clone(&arrived), Arc::clone(&release));
                async move {
                    arrived.notify_one();
                    release.notified().await;
                    Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"late"))))
                }
            }
        });
        let stop = CancellationToken::new();
        let limits = Limits { drain, ..Limits::default() };
        let config = certs.server_config(None).unwrap();
        let server = tokio::spawn(serve(listener, Some(config), service, limits, stop.clone()));
        let request = tokio::spawn(get(address, client(&bundle, &clock, None, &[])));
        arrived.notified().await;
        stop.cancel();
        if released {
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(TcpStream::connect(address).await.is_err(), "no new connections");
            release.notify_one();
            assert!(request.await.unwrap().is_ok());
        }
        server.await.unwrap();
    }
}
