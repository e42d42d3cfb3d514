//! The socket with which NVIDIA's plugin registers.
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
/// Shortest and longest time between two new sockets, so that a plugin that fails at once is not driven in circles.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A socket that served for this long without a doubt ends the back-off.
const QUIET: Duration = Duration::from_secs(60);
/// How long a socket that is gone stays away while the kubelet's is still the old one: then it was not a kubelet's doing.
const WIPE: Duration = Duration::from_secs(1);

/// Serves registrations until `stop`; makes the socket anew when it is gone, or when `upstreams` is in doubt.
pub async fn run(upstreams: Arc<Upstreams>, mut directory: DirectoryWatch, stop: CancellationToken) {
    let path = directory.path().join(SOCKET);
    let mut pause = PAUSE.0;
    while !stop.is_cancelled() {
        let began = tokio::time::Instant::now();
        let kubelet = Stamp::of(&directory.path().join(KUBELET));
        match serve(&upstreams, &path, &mut directory, &stop).await {
            Ok(ServeEnd::Gone) => {
                tokio::select! { () = wiped(&mut directory, kubelet) => continue, () = stop.cancelled() => break }
            }
            Ok(ServeEnd::Ended) => {}
            Err(error) => tracing::warn!(%error, "NVIDIA's plugin cannot register"),
        }
        pause = if began.elapsed() >= QUIET { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        tokio::select! { () = tokio::time::sleep(pause) => {}, () = stop.cancelled() => {} }
    }
    let _ = std::fs::remove_file(&path);
}

/// Waits until the kubelet that wiped the directory is done with it.
///
/// A kubelet that starts deletes all sockets one by one and makes its own last (`pkg/kubelet/cm/devicemanager/plugin/v1beta1`,
/// `server.go`). NVIDIA's plugin starts anew when it sees the socket that it registers with: made too early, its own socket
/// falls to the same wipe, and it tries again 30 s later.
async fn wiped(directory: &mut DirectoryWatch, before: Option<Stamp>) {
    let kubelet = directory.path().join(KUBELET);
    let same_for_long = tokio::time::sleep(WIPE);
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

/// One life of the socket.
async fn serve(
    upstreams: &Arc<Upstreams>,
    path: &Path,
    directory: &mut DirectoryWatch,
    stop: &CancellationToken,
) -> Result<ServeEnd, BindError> {
    let listener = bind(path)?;
    let own = Stamp::of(path);
    let over = stop.child_token();
    let service = RegistrationServer::new(Desk { upstreams: upstreams.clone() });
    let mut server = tokio::spawn(
        Server::builder()
            .add_service(service)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), over.clone().cancelled_owned()),
    );
    tracing::info!(socket = %path.display(), "NVIDIA's plugin may register");
    let outcome = loop {
        tokio::select! {
            () = directory.changed() => if Stamp::of(path) != own { break ServeEnd::Gone },
            () = upstreams.reregistration_requested() => break ServeEnd::Ended,
            () = stop.cancelled() => break ServeEnd::Ended,
            _ = &mut server => break ServeEnd::Ended,
        }
    };
    over.cancel();
    if !server.is_finished() && tokio::time::timeout(Duration::from_millis(200), &mut server).await.is_err() {
        server.abort();
    }
    Ok(outcome)
}

/// How a life of the socket ended.
enum ServeEnd {
    /// Someone deleted it.
    Gone,
    /// A doubt, or the end.
    Ended,
}

struct Desk {
    upstreams: Arc<Upstreams>,
}

#[tonic::async_trait]
impl Registration for Desk {
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
        tokio::time::timeout(Duration::from_millis(200), wiped(watch, before)).await.is_ok()
    }

    #[tokio::test]
    async fn the_wipe_of_a_starting_kubelet_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let mut watch = DirectoryWatch::start(dir.path().to_path_buf(), stop.clone());
        kubelet_starts(dir.path());
        let old = Stamp::of(&dir.path().join(KUBELET));
        assert!(!back(&mut watch, old).await, "the old kubelet's socket is not deleted yet");
        std::fs::remove_file(dir.path().join(KUBELET)).unwrap();
        assert!(!back(&mut watch, old).await, "the new kubelet has not made its socket yet");
        kubelet_starts(dir.path());
        wiped(&mut watch, old).await;
        stop.cancel();
    }

    #[tokio::test]
    async fn a_socket_that_someone_else_deleted_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let mut watch = DirectoryWatch::start(dir.path().to_path_buf(), stop.clone());
        kubelet_starts(dir.path());
        wiped(&mut watch, Stamp::of(&dir.path().join(KUBELET))).await;
        stop.cancel();
    }
}
