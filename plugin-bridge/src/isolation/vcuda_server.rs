//! `vcuda.sock` of one pod: its containers register by name or ID, and get their two files.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::layout::{VcudaConfig, pids_config};
use crate::proto::vcuda::vcuda_service_server::{VcudaService, VcudaServiceServer};
use crate::proto::vcuda::{VDeviceRequest, VDeviceResponse};

/// Limits of the pod's containers, by name.
pub(super) type Registered = Arc<Mutex<BTreeMap<String, VcudaConfig>>>;

/// Serves the socket of one pod until `stop`.
pub(super) fn serve(folder: &Path, registered: Registered, stop: CancellationToken) -> std::io::Result<()> {
    let socket = folder.join("vcuda.sock");
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&socket)?;
    // Containers run as any user.
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o777))?;
    let service = VcudaServiceServer::new(VcudaRegistration { folder: folder.to_path_buf(), registered });
    tokio::spawn(async move {
        let serving = Server::builder()
            .add_service(service)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned());
        if let Err(error) = serving.await {
            tracing::warn!(%error, "serving vcuda.sock of a pod failed");
        }
    });
    Ok(())
}

struct VcudaRegistration {
    folder: PathBuf,
    registered: Registered,
}

#[tonic::async_trait]
impl VcudaService for VcudaRegistration {
    async fn register_v_device(
        &self,
        request: Request<VDeviceRequest>,
    ) -> Result<Response<VDeviceResponse>, Status> {
        let request = request.into_inner();
        // What comes from a container is not to be trusted with a path.
        let plain =
            |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        // Old clients know their ID alone, new ones their name: one of them names the folder.
        let id =
            if request.container_id.is_empty() { &request.container_name } else { &request.container_id };
        if !plain(id) {
            return Err(Status::invalid_argument(format!(
                "container_id {id:?} is not letters, digits, - and _"
            )));
        }
        let known = self.registered.lock();
        let config = if request.container_name.is_empty() && known.len() == 1 {
            known.values().next().cloned()
        } else {
            known.get(&request.container_name).cloned()
        };
        drop(known);
        let config = config.ok_or_else(|| {
            Status::not_found(format!("container {:?} of this pod has no share", request.container_name))
        })?;
        let folder = self.folder.join(id);
        let write = || {
            std::fs::create_dir_all(&folder)?;
            replace(&folder.join("vcuda.config"), &config.bytes())?;
            replace(&folder.join("pids.config"), &pids_config(&processes(id)))
        };
        write().map_err(|e: std::io::Error| Status::internal(format!("{}: {e}", folder.display())))?;
        Ok(Response::new(VDeviceResponse {}))
    }
}

/// A reader sees the old file or the new one.
fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    std::fs::write(&beside, content)?;
    std::fs::rename(beside, path)
}

/// Processes of the container: those in a cgroup (version 1 or 2) whose path names it.
fn processes(container: &str) -> Vec<i32> {
    // IDs of containers are long; a short text would match anything.
    if container.len() < 12 {
        return Vec::new();
    }
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if std::fs::read_to_string(entry.path().join("cgroup")).is_ok_and(|text| text.contains(container)) {
            pids.push(pid);
        }
    }
    pids.sort_unstable();
    pids
}
