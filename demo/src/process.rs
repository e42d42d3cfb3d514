//! The parts of gpu-migrate, each with a runtime of its own: ended as a process is killed, at once and with its sockets left behind.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

#[derive(Debug)]
pub(super) struct Process {
    name: String,
    runtime: Option<Runtime>,
    ended: Arc<Mutex<Option<String>>>,
}

impl Process {
    /// Starts `main` on threads of its own.
    pub(super) fn start<F>(name: &str, main: F) -> std::io::Result<Self>
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name(name).enable_all().build()?;
        let ended = Arc::new(Mutex::new(None));
        let (told, own_name) = (ended.clone(), name.to_owned());
        runtime.spawn(async move {
            let how = match main.await {
                Ok(()) => "it ended".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            tracing::error!(name = own_name, how, "a part ended");
            *told.lock() = Some(how);
        });
        Ok(Self { name: name.to_owned(), runtime: Some(runtime), ended })
    }

    /// Why it ended by itself, if it did.
    pub(super) fn ended(&self) -> Option<String> {
        self.ended.lock().as_ref().map(|how| format!("{}: {how}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // All tasks end where they stand. Waiting for them is not possible from within another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
