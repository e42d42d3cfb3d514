//! The socket that NVIDIA's plugin registers with.
//!
//! Its name has an `@`: grpc-go sends the escaped path of a unix socket as `:authority`, which the `http` crate refuses; with
//! an `@` the escaped part is userinfo, which it accepts. (Seen with tonic 0.14 and NVIDIA's plugin 0.20.)

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::upstream::Upstreams;
use gpu_migrate_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use gpu_migrate_kubelet_api::deviceplugin::{Empty, RegisterRequest, VERSION};
use gpu_migrate_kubelet_api::directory::{DirectoryWatch, Stamp};
use gpu_migrate_kubelet_api::socket::{BindError, bind};

/// File name in the device plugin directory; `KUBELET_SOCKET` of NVIDIA's plugin is its full path.
pub const SOCKET: &str = "gpu-migrate@kubelet.sock";
/// The kubelet's own socket beside it.
const KUBELET: &str = "kubelet.sock";
/// Shortest and longest time between two new sockets: a plugin that fails at once must not restart in a loop.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A socket that served for this long ends the back-off.
const QUIET: Duration = Duration::from_secs(60);
/// How long to wait with a deleted socket while the kubelet's is still the old one: then no kubelet start deleted it.
const CLEANUP: Duration = Duration::from_secs(1);

/// Serves registrations until `stop`; re-creates the socket when it is gone, or when `upstreams` requests it.
pub async fn run(upstreams: Arc<Upstreams>, mut directory: DirectoryWatch, stop: CancellationToken) {
    let path = directory.path().join(SOCKET);
    let mut pause = PAUSE.0;
    while !stop.is_cancelled() {
        let began = tokio::time::Instant::now();
        let kubelet = Stamp::of(&directory.path().join(KUBELET));
        match serve(&upstreams, &path, &mut directory, &stop).await {
            Ok(ServeEnd::SocketDeleted) => {
                tokio::select! { () = kubelet_socket_recreated(&mut directory, kubelet) => continue, () = stop.cancelled() => break }
            }
            Ok(ServeEnd::Reregister) => {}
            Err(error) => tracing::warn!(%error, "serving registrations of NVIDIA's plugin failed; retrying"),
        }
        pause = if began.elapsed() >= QUIET { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        tokio::select! { () = tokio::time::sleep(pause) => {}, () = stop.cancelled() => {} }
    }
    let _ = std::fs::remove_file(&path);
}

/// Waits until the kubelet that deletes all sockets at its start is done with that.
///
/// A kubelet that starts deletes all sockets one by one and creates its own last (`pkg/kubelet/cm/devicemanager/plugin/v1beta1`,
/// `server.go`). NVIDIA's plugin restarts when it sees the socket that it registers with: created too early, its own socket
/// is deleted as well, and it retries 30 s later.
async fn kubelet_socket_recreated(directory: &mut DirectoryWatch, before: Option<Stamp>) {
    let kubelet = directory.path().join(KUBELET);
    let same_for_long = tokio::time::sleep(CLEANUP);
    tokio::pin!(same_for_long);
    loop {
        let now = Stamp::of(&kubelet);
        if now.is_some() && (now != before || same_for_long.is_elapsed()) {
            return;
        }
        tokio::select! {
            () = directory.changed() => {}
            () = &mut same_for_long, if !same_for_long.is_elapsed() => {}
        }
    }
}

/// Serves one socket until it is gone or `upstreams` requests another.
async fn serve(
    upstreams: &Arc<Upstreams>,
    path: &Path,
    directory: &mut DirectoryWatch,
    stop: &CancellationToken,
) -> Result<ServeEnd, BindError> {
    let listener = bind(path)?;
    let own = Stamp::of(path);
    let over = stop.child_token();
    let service = RegistrationServer::new(RegistrationService { upstreams: upstreams.clone() });
    let mut server = tokio::spawn(
        Server::builder()
            .add_service(service)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), over.clone().cancelled_owned()),
    );
    tracing::info!(socket = %path.display(), "waiting for NVIDIA's plugin to register");
    let outcome = loop {
        tokio::select! {
            () = directory.changed() => if Stamp::of(path) != own { break ServeEnd::SocketDeleted },
            () = upstreams.reregistration_requested() => break ServeEnd::Reregister,
            () = stop.cancelled() => break ServeEnd::Reregister,
            _ = &mut server => break ServeEnd::Reregister,
        }
    };
    over.cancel();
    if !server.is_finished() && tokio::time::timeout(Duration::from_millis(200), &mut server).await.is_err() {
        server.abort();
    }
    Ok(outcome)
}

enum ServeEnd {
    SocketDeleted,
    /// NVIDIA's plugin is to register again, or the agent stops.
    Reregister,
}

struct RegistrationService {
    upstreams: Arc<Upstreams>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        if request.version != VERSION {
            return Err(Status::failed_precondition(format!(
                "device plugin API {:?} is not served here; expected {VERSION:?}",
                request.version
            )));
        }
        if request.endpoint.is_empty() || request.endpoint.contains('/') || request.endpoint.starts_with("..")
        {
            return Err(Status::invalid_argument(format!(
                "endpoint {:?} is not a file name in the device plugin directory",
                request.endpoint
            )));
        }
        if request.resource_name.is_empty() {
            return Err(Status::invalid_argument(
                "resource_name is empty; expected for example \"nvidia.com/gpu\"",
            ));
        }
        self.upstreams.register(request).map(|()| Response::new(Empty {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file where a kubelet has its socket: only its stamp is looked at.
    fn kubelet_starts(folder: &Path) {
        std::fs::write(folder.join(KUBELET), "").unwrap();
    }

    async fn back(watch: &mut DirectoryWatch, before: Option<Stamp>) -> bool {
        tokio::time::timeout(Duration::from_millis(200), kubelet_socket_recreated(watch, before))
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn a_starting_kubelet_deletes_its_sockets_first() {
        let dir = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let mut watch = DirectoryWatch::start(dir.path().to_path_buf(), stop.clone());
        kubelet_starts(dir.path());
        let old = Stamp::of(&dir.path().join(KUBELET));
        assert!(!back(&mut watch, old).await, "the old kubelet's socket is not deleted yet");
        std::fs::remove_file(dir.path().join(KUBELET)).unwrap();
        assert!(!back(&mut watch, old).await, "the new kubelet has not created its socket yet");
        kubelet_starts(dir.path());
        kubelet_socket_recreated(&mut watch, old).await;
        stop.cancel();
    }

    #[tokio::test]
    async fn a_socket_deleted_without_a_kubelet_start_is_created_again() {
        let dir = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let mut watch = DirectoryWatch::start(dir.path().to_path_buf(), stop.clone());
        kubelet_starts(dir.path());
        kubelet_socket_recreated(&mut watch, Stamp::of(&dir.path().join(KUBELET))).await;
        stop.cancel();
    }
}
