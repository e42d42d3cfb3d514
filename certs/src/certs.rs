//! The handle to the certificates of one server, and the background task that keeps them fresh.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use rustls::crypto::CryptoProvider;
use rustls_pki_types::CertificateDer;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::authority::{Leaf, Validity};
use crate::external::{self, FolderWatch};
use crate::keyring::Keyring;
use crate::resolver::Resolver;
use crate::store::{Store, Stored};
use crate::{Bundle, CertError, ClientAuth, Clock, Lifetimes};

pub enum Source {
    /// Our own CA in a Secret that the replicas share; leafs in memory.
    Secret(SecretPlace),
    /// Our own CA in a folder of this process alone; leafs in memory. Clients read `ca.crt` there.
    SelfSigned(PathBuf),
    /// `tls.crt`, `tls.key` and perhaps `ca.crt`, written and renewed by cert-manager or by hand.
    External(PathBuf),
}

/// Which Secret, and which replica this is.
pub struct SecretPlace {
    pub client: Client,
    /// Namespace of the Secret and the Lease.
    pub namespace: String,
    pub name: String,
    /// Name of this replica in the Lease.
    pub identity: String,
}

impl Source {
    /// A folder: external where it holds a `tls.crt`, else the place of a CA of our own.
    #[must_use]
    pub fn folder(path: &Path) -> Self {
        if path.join(external::CERTIFICATE).exists() {
            Self::External(path.into())
        } else {
            Self::SelfSigned(path.into())
        }
    }
}

#[derive(Clone, Debug)]
pub struct Options {
    /// Part of the CA's name.
    pub owner: String,
    /// DNS names and IP addresses that clients use.
    pub names: Vec<String>,
    /// How long things live; of no effect on external certificates.
    pub lifetimes: Lifetimes,
}

/// Handle to the certificates of one server. Cheap to clone.
#[derive(Clone)]
pub struct Certs {
    clock: Clock,
    resolver: Arc<Resolver>,
    bundle: watch::Receiver<Option<Bundle>>,
    refresh: mpsc::Sender<oneshot::Sender<()>>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    issued: AtomicU64,
    errors: AtomicU64,
}

/// The background task that belongs to a [`Certs`]: run it, or nothing is ever renewed.
pub struct CertRotator {
    place: Place,
    options: Options,
    clock: Clock,
    leaf: Option<(Validity, CertificateDer<'static>)>,
    resolver: Arc<Resolver>,
    bundle: watch::Sender<Option<Bundle>>,
    requests: mpsc::Receiver<oneshot::Sender<()>>,
    counts: Arc<Counts>,
}

enum Place {
    Own(Store),
    External(PathBuf),
}

/// How often a keyring is read again when other replicas keep writing it first.
const ATTEMPTS: u32 = 5;
/// Pause before the next try while there is no certificate at all.
const RETRY: Duration = Duration::from_secs(2);
const POLL_FOLDER: Duration = Duration::from_secs(30);

impl Certs {
    /// Gets a first certificate and returns the handle and the task that renews it.
    ///
    /// # Errors
    /// [`CertError`] when folders or names are wrong. An API server that does not answer is no error: the handle
    /// is not ready then, and the [`CertRotator`] keeps trying.
    pub async fn start(
        source: Source,
        options: Options,
        clock: Clock,
    ) -> Result<(Self, CertRotator), CertError> {
        let place = match source {
            Source::Secret(SecretPlace { client, namespace, name, identity }) => {
                Place::Own(Store::secret(client, &namespace, &name, &identity))
            }
            Source::SelfSigned(path) => Place::Own(Store::Folder(path)),
            Source::External(path) => Place::External(path),
        };
        let (bundle, bundle_seen) = watch::channel(None);
        let (refresh, requests) = mpsc::channel(8);
        let (resolver, counts) = (Arc::new(Resolver::default()), Arc::new(Counts::default()));
        let mut rotator = CertRotator {
            place,
            options,
            clock: Arc::clone(&clock),
            leaf: None,
            resolver: Arc::clone(&resolver),
            bundle,
            requests,
            counts: Arc::clone(&counts),
        };
        match rotator.tick().await {
            Err(error @ (CertError::Api { .. } | CertError::Clock { .. })) => {
                tracing::warn!(%error, "no certificate yet; retrying");
            }
            other => other?,
        }
        Ok((Self { clock, resolver, bundle: bundle_seen, refresh, counts }, rotator))
    }

    /// A rustls configuration (TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1) that always uses the current certificate.
    ///
    /// # Errors
    /// [`CertError`] when the client CA cannot be read.
    pub fn server_config(
        &self,
        clients: Option<&ClientAuth>,
    ) -> Result<Arc<rustls::ServerConfig>, CertError> {
        let provider = CryptoProvider::get_default()
            .cloned()
            .unwrap_or_else(|| Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|e| CertError::Tls(e.to_string()))?;
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(clients) => builder.with_client_cert_verifier(clients.verifier(&provider)?),
        };
        let resolver: Arc<dyn rustls::server::ResolvesServerCert> = Arc::clone(&self.resolver) as _;
        let mut config = builder.with_cert_resolver(resolver);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// The CA certificates that clients must trust, as they change. `None` while unknown (external without `ca.crt`).
    #[must_use]
    pub fn bundle(&self) -> watch::Receiver<Option<Bundle>> {
        self.bundle.clone()
    }

    /// Reads the shared Secret now. To be called before a foreign `caBundle` is overwritten: it may be newer than
    /// what this replica knows.
    pub async fn refresh(&self) -> Option<Bundle> {
        let (done, wait) = oneshot::channel();
        if self.refresh.send(done).await.is_ok() {
            let _ = wait.await;
        }
        self.bundle.borrow().clone()
    }

    /// Whether there is a certificate to serve with.
    ///
    /// # Errors
    /// Why not: there is none yet, or it has expired.
    pub fn check(&self) -> Result<(), String> {
        match self.expires() {
            None => Err("no certificate yet".to_owned()),
            Some(expired) if expired <= (self.clock)() => {
                Err(format!("the serving certificate expired at {expired}: renew it"))
            }
            Some(_) => Ok(()),
        }
    }

    /// When the serving certificate expires.
    #[must_use]
    pub fn expires(&self) -> Option<Timestamp> {
        self.resolver.expires().and_then(|seconds| Timestamp::from_second(seconds).ok())
    }

    /// Adds expiry, issue count and error count to a registry (whose prefix names the component).
    pub fn register_metrics(&self, registry: &mut Registry) {
        let (resolver, counts) = (Arc::clone(&self.resolver), Arc::clone(&self.counts));
        registry.register_collector(Box::new(Collector { resolver, counts }));
    }
}

#[derive(Debug)]
struct Collector {
    resolver: Arc<Resolver>,
    counts: Arc<Counts>,
}

impl prometheus_client::collector::Collector for Collector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let expires = ConstGauge::new(self.resolver.expires().unwrap_or(0));
        let help = "When the serving certificate expires, seconds since 1970; 0 while there is none";
        let unit = Unit::Seconds;
        let metric = encoder.encode_descriptor(
            "certificate_expiry_timestamp",
            help,
            Some(&unit),
            expires.metric_type(),
        )?;
        expires.encode(metric)?;
        for (name, help, value) in [
            ("certificates_issued", "Serving certificates put into use since the start", &self.counts.issued),
            ("certificate_errors", "Failed attempts to renew or read certificates", &self.counts.errors),
        ] {
            let counter = ConstCounter::new(value.load(Ordering::Relaxed));
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        Ok(())
    }
}

impl CertRotator {
    /// Renews until `stop`. Errors are logged and counted; the last good certificate stays in use.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut watch = match &self.place {
            Place::External(folder) => Some(FolderWatch::new(folder, POLL_FOLDER)),
            Place::Own(_) => None,
        };
        loop {
            let pause = self.options.lifetimes.check_every();
            let pause = if self.leaf.is_none() { pause.min(RETRY) } else { pause };
            let changed = async {
                match &mut watch {
                    Some(watch) => watch.changed().await,
                    None => tokio::time::sleep(pause).await,
                }
            };
            let requested = tokio::select! {
                () = stop.cancelled() => return,
                request = self.requests.recv() => request,
                () = changed => None,
            };
            if let Err(error) = self.tick().await {
                self.counts.errors.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%error, "certificates not renewed; the last good one stays in use");
            }
            if let Some(done) = requested {
                let _ = done.send(());
            }
        }
    }

    /// Does what is due now by the clock and the store.
    ///
    /// # Errors
    /// [`CertError`]; nothing changed then.
    pub async fn tick(&mut self) -> Result<(), CertError> {
        let now = (self.clock)();
        match &mut self.place {
            Place::Own(store) => {
                let known = self.bundle.borrow().clone();
                let keyring = current(store, known.as_ref(), &self.options, now).await?;
                if !is_fresh(self.leaf.as_ref(), &keyring, &self.options.lifetimes, now) {
                    store.check_clock(now).await?;
                }
                self.serve_with(&keyring, now)
            }
            Place::External(folder) => {
                let (origin, found) = (folder.display().to_string(), external::read(folder)?);
                self.adopt(&origin, found, now)
            }
        }
    }

    fn serve_with(&mut self, keyring: &Keyring, now: Timestamp) -> Result<(), CertError> {
        let fresh = is_fresh(self.leaf.as_ref(), keyring, &self.options.lifetimes, now);
        let signer = keyring.signing().der();
        let bundle = keyring.bundle();
        // The bundle goes out before a certificate that needs it.
        self.bundle.send_if_modified(|old| old.replace(bundle.clone()).as_ref() != Some(&bundle));
        if fresh {
            return Ok(());
        }
        let Leaf { certificate, key, validity } =
            keyring.signing().issue(&self.options.names, now, &self.options.lifetimes)?;
        self.resolver.set("own CA", vec![certificate], key, validity)?;
        self.counts.issued.fetch_add(1, Ordering::Relaxed);
        tracing::info!(names = ?self.options.names, expires = %validity.not_after, "new serving certificate");
        self.leaf = Some((validity, signer.clone()));
        Ok(())
    }

    fn adopt(&mut self, origin: &str, found: external::Files, now: Timestamp) -> Result<(), CertError> {
        let external::Files { chain, key, validity, bundle } = found;
        let first = chain.first().cloned();
        if self.resolver.certificate() != first {
            self.resolver.set(origin, chain, key, validity)?;
            self.counts.issued.fetch_add(1, Ordering::Relaxed);
            if validity.not_after <= now {
                tracing::error!(folder = origin, expired = %validity.not_after, "serving certificate has expired: renew it");
            } else {
                tracing::info!(folder = origin, expires = %validity.not_after, "serving certificate read");
            }
            self.leaf = first.map(|certificate| (validity, certificate));
        }
        self.bundle.send_if_modified(|old| std::mem::replace(old, bundle.clone()) != bundle);
        Ok(())
    }
}

/// Whether the certificate in use is not due, and is of the CA that signs now, or of one that clients know longer.
fn is_fresh(
    leaf: Option<&(Validity, CertificateDer<'static>)>,
    keyring: &Keyring,
    lifetimes: &Lifetimes,
    now: Timestamp,
) -> bool {
    leaf.is_some_and(|(validity, by)| {
        let of_signing = by == keyring.signing().der();
        !validity.due(now) && (of_signing || keyring.knows(by) && !keyring.settled(now, lifetimes))
    })
}

/// The keyring that all replicas use, after the steps that are due. Where there is none, its CAs follow those in `known`.
async fn current(
    store: &mut Store,
    known: Option<&Bundle>,
    options: &Options,
    now: Timestamp,
) -> Result<Keyring, CertError> {
    for _ in 0..ATTEMPTS {
        let Some(stored) = store.load().await? else {
            store.check_clock(now).await?;
            let first = Keyring::successor(known, &options.owner, now, &options.lifetimes)?;
            if store.create(&first).await? {
                tracing::info!(store = store.origin(), "new CA");
                return Ok(first);
            }
            continue;
        };
        let Some(step) = stored.keyring.due(now, &options.lifetimes) else { return Ok(stored.keyring) };
        store.check_clock(now).await?;
        if !store.may_rotate().await? {
            return Ok(stored.keyring);
        }
        tracing::info!(?step, store = store.origin(), "CA rotation");
        let version = stored.version().map(str::to_owned);
        let Stored { keyring, .. } = stored;
        let keyring = keyring.take(step, &options.owner, now, &options.lifetimes)?;
        // Written or not, the next iteration reads what is there now.
        let replaced = store.replace(version.as_deref(), &keyring).await;
        store.release().await;
        replaced?;
    }
    Err(CertError::Contended { object: store.origin(), attempts: ATTEMPTS })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn options(seconds: u64) -> Options {
        let lifetimes =
            Lifetimes { ca: Duration::from_secs(10 * seconds), leaf: Duration::from_secs(seconds) };
        Options { owner: "test".into(), names: vec!["localhost".into()], lifetimes }
    }

    fn hand_clock() -> (Clock, Arc<Mutex<Timestamp>>) {
        let time = Arc::new(Mutex::new(Timestamp::from_second(1_800_000_000).unwrap()));
        let read = Arc::clone(&time);
        (Arc::new(move || *read.lock().unwrap()), time)
    }

    fn forward(time: &Mutex<Timestamp>, seconds: u64) {
        let mut time = time.lock().unwrap();
        *time = time.checked_add(Duration::from_secs(seconds)).unwrap();
    }

    #[tokio::test]
    async fn a_leaf_is_renewed_at_two_thirds_and_kept_before() {
        let folder = tempfile::tempdir().unwrap();
        let (clock, time) = hand_clock();
        let (certs, mut rotator) =
            Certs::start(Source::folder(folder.path()), options(300), clock).await.unwrap();
        let first = certs.resolver.certificate().unwrap();
        forward(&time, 180);
        rotator.tick().await.unwrap();
        assert_eq!(certs.resolver.certificate().unwrap(), first);
        forward(&time, 20);
        rotator.tick().await.unwrap();
        assert_ne!(certs.resolver.certificate().unwrap(), first);
    }

    #[tokio::test]
    async fn a_ca_is_in_the_bundle_before_it_signs() {
        let folder = tempfile::tempdir().unwrap();
        let (clock, time) = hand_clock();
        let (certs, mut rotator) =
            Certs::start(Source::folder(folder.path()), options(300), clock).await.unwrap();
        let mut known = certs.bundle().borrow().clone().unwrap();
        for _ in 0..600 {
            forward(&time, 10);
            rotator.tick().await.unwrap();
            let signer = rotator.leaf.as_ref().unwrap().1.clone();
            // A client that read the bundle one tick ago still trusts the certificate of now.
            assert!(known.certificates().contains(&signer));
            known = certs.bundle().borrow().clone().unwrap();
        }
        assert!(certs.counts.issued.load(Ordering::Relaxed) > 20);
    }

    /// The way to be rid of a CA that was read by others: while servers and clients learn of the next one, no call fails.
    #[tokio::test]
    async fn a_deleted_keyring_is_followed_by_another_with_an_overlap() {
        let folder = tempfile::tempdir().unwrap();
        let (clock, time) = hand_clock();
        let start =
            || Certs::start(Source::SelfSigned(folder.path().into()), options(300), Arc::clone(&clock));
        let mut servers = [start().await.unwrap(), start().await.unwrap()];
        let old = servers[0].1.leaf.as_ref().unwrap().1.clone();
        for name in crate::keyring::entry::ALL {
            let _ = std::fs::remove_file(folder.path().join(name));
        }
        // Seconds, and how many CAs are trusted then.
        for (seconds, count) in [(0, 2), (50, 2), (240, 2), (20, 2), (280, 2), (20, 1)] {
            forward(&time, seconds);
            let known = servers.each_ref().map(|(certs, _)| certs.bundle().borrow().clone().unwrap());
            for (certs, rotator) in &mut servers {
                rotator.tick().await.unwrap();
                let signer = rotator.leaf.as_ref().unwrap().1.clone();
                // A client that read the bundle of either server one tick ago trusts the certificate of now.
                assert!(known.iter().all(|bundle| bundle.certificates().contains(&signer)), "{seconds}");
                let trusted = certs.bundle().borrow().as_ref().unwrap().certificates();
                assert_eq!((trusted.len(), trusted.contains(&old)), (count, count == 2), "{seconds}");
            }
        }
    }

    #[tokio::test]
    async fn external_files_are_read_again_and_bad_ones_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let now = Timestamp::now();
        let write = |owner: &str| {
            let ca = crate::authority::Ca::generate(owner, now, &Lifetimes::default()).unwrap();
            for (name, text) in [("tls.crt", ca.pem()), ("tls.key", &ca.key_pem()), ("ca.crt", ca.pem())] {
                std::fs::write(folder.path().join(name), text).unwrap();
            }
            ca.der().clone()
        };
        let one = write("one");
        let (certs, mut rotator) =
            Certs::start(Source::folder(folder.path()), options(300), crate::wall_clock()).await.unwrap();
        assert_eq!(certs.resolver.certificate().unwrap(), one);
        let two = write("two");
        rotator.tick().await.unwrap();
        assert_eq!(certs.resolver.certificate().unwrap(), two);
        assert_eq!(certs.bundle().borrow().as_ref().unwrap().certificates(), std::slice::from_ref(&two));
        std::fs::write(folder.path().join("tls.key"), "half writ").unwrap();
        assert!(rotator.tick().await.is_err());
        assert_eq!(certs.resolver.certificate().unwrap(), two);
    }

    #[tokio::test]
    async fn an_expired_certificate_is_not_ready() {
        let folder = tempfile::tempdir().unwrap();
        let (clock, time) = hand_clock();
        let ca = crate::authority::Ca::generate("one", clock(), &options(300).lifetimes).unwrap();
        for (name, text) in [("tls.crt", ca.pem()), ("tls.key", &ca.key_pem())] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let (certs, mut rotator) =
            Certs::start(Source::folder(folder.path()), options(300), clock).await.unwrap();
        certs.check().unwrap();
        forward(&time, 3000);
        let expired = certs.check().unwrap_err();
        assert!(expired.starts_with("the serving certificate expired at 2027-01-15T"), "{expired}");
        rotator.tick().await.unwrap();
        assert!(certs.check().is_err(), "reading it again does not help");
    }

    #[tokio::test]
    async fn metrics_tell_the_expiry() {
        let folder = tempfile::tempdir().unwrap();
        let (clock, _) = hand_clock();
        let (certs, _rotator) =
            Certs::start(Source::folder(folder.path()), options(300), clock).await.unwrap();
        let mut registry = Registry::default();
        certs.register_metrics(registry.sub_registry_with_prefix("gpu_migrate_webhook"));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(
            text.contains("gpu_migrate_webhook_certificate_expiry_timestamp_seconds 1800000300"),
            "{text}"
        );
        assert!(text.contains("gpu_migrate_webhook_certificates_issued_total 1"), "{text}");
    }
}
