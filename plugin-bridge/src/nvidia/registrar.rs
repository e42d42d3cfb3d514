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
use crate::kubelet::directory::{DirectoryWatch, Stamp};
use crate::kubelet::endpoint::{EndpointError, bind};
use crate::proto::deviceplugin::registration_server::{Registration, RegistrationServer};
use crate::proto::deviceplugin::{Empty, RegisterRequest, VERSION};

/// File name in the device plugin directory; `KUBELET_SOCKET` of NVIDIA's plugin is its full path.
pub const SOCKET: &str = "gpu-migrate@kubelet.sock";
/// Shortest and longest time between two new sockets, so that a plugin that fails at once is not driven in circles.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A socket that served for this long without a doubt ends the back-off.
const QUIET: Duration = Duration::from_secs(60);

/// Serves registrations until `stop`; makes the socket anew when it is gone, or when `upstreams` is in doubt.
pub async fn run(upstreams: Arc<Upstreams>, mut directory: DirectoryWatch, stop: CancellationToken) {
    let path = directory.path().join(SOCKET);
    let mut pause = PAUSE.0;
    while !stop.is_cancelled() {
        let began = tokio::time::Instant::now();
        match serve(&upstreams, &path, &mut directory, &stop).await {
            // Wiped by a kubelet that starts: the sooner the plugin registers again, the better.
            Ok(Over::Gone) => continue,
            Ok(Over::Ended) => {}
            Err(error) => tracing::warn!(%error, "NVIDIA's plugin cannot register"),
        }
        pause = if began.elapsed() >= QUIET { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        tokio::select! { () = tokio::time::sleep(pause) => {}, () = stop.cancelled() => {} }
    }
    let _ = std::fs::remove_file(&path);
}

/// One life of the socket.
async fn serve(
    upstreams: &Arc<Upstreams>,
    path: &Path,
    directory: &mut DirectoryWatch,
    stop: &CancellationToken,
) -> Result<Over, EndpointError> {
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
            () = directory.changed() => if Stamp::of(path) != own { break Over::Gone },
            () = upstreams.doubted() => break Over::Ended,
            () = stop.cancelled() => break Over::Ended,
            _ = &mut server => break Over::Ended,
        }
    };
    over.cancel();
    if !server.is_finished() && tokio::time::timeout(Duration::from_millis(200), &mut server).await.is_err() {
        server.abort();
    }
    Ok(outcome)
}

/// How a life of the socket ended.
enum Over {
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
