//! Keeps one resource registered with the kubelet: serve, register, detect that the registration is lost, register again.
//!
//! The order is the kubelet's (`pkg/kubelet/cm/devicemanager`): `Register` dials back before it returns, so the socket is served
//! first; and when an *old* `ListAndWatch` ends after a *new* registration, the kubelet drops the new one, so the old server is
//! gone before the new one registers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::plugins::list_and_watch::Streams;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use gpu_migrate_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use gpu_migrate_kubelet_api::deviceplugin::{DevicePluginOptions, KUBELET_SOCKET, RegisterRequest, VERSION};
use gpu_migrate_kubelet_api::directory::{DirectoryWatch, Stamp};
use gpu_migrate_kubelet_api::socket::{self, BindError, bind, dial};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

/// The kubelet calls back for the options, up to 10 s, before `Register` returns.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(12);
/// How long old streams get to end before their server is dropped.
const DRAIN: Duration = Duration::from_millis(500);
/// What the kubelet needs to notice that an old stream has ended, when it is the same kubelet.
const SETTLE: Duration = Duration::from_millis(100);
/// Shortest and longest wait after a failed registration.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Our sockets, and no others, have names that begin so.
const SOCKET_PREFIX: &str = "gpu-migrate-";

/// Why serving or registering failed. It is retried without limit.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// Our socket could not be created.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The kubelet does not answer on its socket.
    #[error("cannot reach the kubelet on {path}: {source}")]
    Dial {
        /// Path of the kubelet's socket.
        path: PathBuf,
        source: tonic::transport::Error,
    },
    #[error("the kubelet refused to register {resource}: {status}")]
    Refused { resource: String, status: Box<tonic::Status> },
}

#[derive(Clone, Debug)]
pub struct EndpointSpec {
    pub resource: String,
    pub options: DevicePluginOptions,
}

/// The registration of one resource with the kubelet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegistrationState {
    pub registrations: u64,
    pub registered: bool,
}

/// Makes a fresh service for each registration.
pub type MakeService<S> = Arc<dyn Fn(Streams) -> S + Send + Sync>;

/// Serves and registers one resource until `stop`, whatever the kubelet does.
pub async fn run<S: DevicePlugin>(
    spec: EndpointSpec,
    mut directory: DirectoryWatch,
    make: MakeService<S>,
    state: watch::Sender<RegistrationState>,
    stop: CancellationToken,
) {
    let kubelet = directory.path().join(KUBELET_SOCKET);
    let mut back_off = BACK_OFF.0;
    while !stop.is_cancelled() {
        let Some(kubelet_stamp) = Stamp::of(&kubelet) else {
            tokio::select! { () = directory.changed() => continue, () = stop.cancelled() => break }
        };
        let name = fresh_socket_name(&spec.resource);
        let own = directory.path().join(&name);
        match Session::start(&spec, &own, &name, &kubelet, &make).await {
            Ok(session) => {
                back_off = BACK_OFF.0;
                state.send_modify(|s| (s.registrations, s.registered) = (s.registrations + 1, true));
                tracing::info!(resource = %spec.resource, socket = %own.display(), "registered with the kubelet");
                let same_kubelet =
                    session.run_until_lost(&mut directory, &kubelet, kubelet_stamp, &own, &stop).await;
                state.send_modify(|s| s.registered = false);
                if same_kubelet && !stop.is_cancelled() {
                    tokio::time::sleep(SETTLE).await;
                }
            }
            Err(error) => {
                tracing::warn!(resource = %spec.resource, %error, retry_in = ?back_off, "registration failed");
                tokio::select! {
                    () = tokio::time::sleep(back_off) => {}
                    () = another_kubelet(&mut directory, &kubelet, kubelet_stamp) => {}
                    () = stop.cancelled() => {}
                }
                back_off = (back_off * 2).min(BACK_OFF.1);
            }
        }
        let _ = std::fs::remove_file(&own);
    }
}

/// A file name in the device plugin directory that no earlier registration had: kubelet 1.37 refuses one that it still knows ("device
/// plugin already connected"), however long ago the connection ended for us.
fn fresh_socket_name(resource: &str) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{SOCKET_PREFIX}{}-{:x}.sock", resource.replace('/', "_"), now.as_millis())
}

/// Removes what agents that were killed left behind.
pub fn remove_old_sockets(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_ours =
            name.to_str().is_some_and(|name| name.starts_with(SOCKET_PREFIX) && name.ends_with(".sock"));
        if is_ours && let Err(error) = std::fs::remove_file(entry.path()) {
            tracing::warn!(socket = %entry.path().display(), %error, "removing a socket of an earlier agent failed");
        }
    }
}

/// Waits until the kubelet's socket is another one.
async fn another_kubelet(directory: &mut DirectoryWatch, kubelet: &Path, before: Stamp) {
    while Stamp::of(kubelet).is_none_or(|now| now == before) {
        directory.changed().await;
    }
}

/// One served socket and its registration.
struct Session {
    own: Stamp,
    streams: Streams,
    server: tokio::task::JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Session {
    async fn start<S: DevicePlugin>(
        spec: &EndpointSpec,
        own: &Path,
        name: &str,
        kubelet: &Path,
        make: &MakeService<S>,
    ) -> Result<Self, EndpointError> {
        let listener = bind(own)?;
        let stamp = Stamp::of(own).ok_or_else(|| BindError {
            path: own.to_path_buf(),
            source: std::io::Error::new(std::io::ErrorKind::NotFound, "the socket was deleted at once"),
        })?;
        let streams = Streams::default();
        let service = DevicePluginServer::new(make(streams.clone()));
        let server = socket::serve(listener, Routes::new(service), streams.stop.clone());
        let session = Self { own: stamp, streams, server: tokio::spawn(server) };
        match register(spec, name, kubelet).await {
            Ok(()) => Ok(session),
            Err(error) => {
                session.end().await;
                Err(error)
            }
        }
    }

    /// Serves until the registration is lost. Returns whether the kubelet is still the same process.
    async fn run_until_lost(
        mut self,
        directory: &mut DirectoryWatch,
        kubelet: &Path,
        kubelet_stamp: Stamp,
        own: &Path,
        stop: &CancellationToken,
    ) -> bool {
        loop {
            let now = Stamp::of(kubelet);
            if now != Some(kubelet_stamp) || Stamp::of(own) != Some(self.own) {
                break;
            }
            tokio::select! {
                () = directory.changed() => {}
                () = stop.cancelled() => break,
                () = self.streams.lost.cancelled() => {
                    tracing::warn!(socket = %own.display(), "the kubelet has ended the stream of this registration");
                    break;
                }
                _ = &mut self.server => break,
            }
        }
        let same_kubelet = Stamp::of(kubelet) == Some(kubelet_stamp);
        self.end().await;
        same_kubelet
    }

    /// Ends all streams, then the server, and waits for both.
    async fn end(mut self) {
        self.streams.stop.cancel();
        if !self.server.is_finished() && tokio::time::timeout(DRAIN, &mut self.server).await.is_err() {
            self.server.abort();
        }
    }
}

async fn register(spec: &EndpointSpec, name: &str, kubelet: &Path) -> Result<(), EndpointError> {
    let channel =
        dial(kubelet).await.map_err(|source| EndpointError::Dial { path: kubelet.to_path_buf(), source })?;
    let mut request = tonic::Request::new(RegisterRequest {
        version: VERSION.into(),
        endpoint: name.to_owned(),
        resource_name: spec.resource.clone(),
        options: Some(spec.options),
    });
    request.set_timeout(REGISTER_TIMEOUT);
    RegistrationClient::new(channel).register(request).await.map(|_| ()).map_err(|status| {
        EndpointError::Refused { resource: spec.resource.clone(), status: Box::new(status) }
    })
}
