//! The cluster behind its lock. How long the lock is held is measured: meanwhile binds and watches wait, and behind them all calls.

use parking_lot::RwLock;
use prometheus_client::metrics::histogram::Histogram;

use super::Clock;
use crate::state::Cluster;

/// [`Cluster`], which is only looked at and changed in closures: nobody waits while he holds it.
pub(super) struct Locked {
    cluster: RwLock<Cluster>,
    clock: Clock,
    held: Histogram,
}

impl Locked {
    pub(super) fn new(clock: Clock, held: Histogram) -> Self {
        Self { cluster: RwLock::new(Cluster::new()), clock, held }
    }

    pub(super) fn read<T>(&self, look: impl FnOnce(&Cluster) -> T) -> T {
        let cluster = self.cluster.read();
        self.timed(|| {
            let seen = look(&cluster);
            drop(cluster);
            seen
        })
    }

    pub(super) fn write<T>(&self, edit: impl FnOnce(&mut Cluster) -> T) -> T {
        let mut cluster = self.cluster.write();
        self.timed(|| {
            let done = edit(&mut cluster);
            drop(cluster);
            done
        })
    }

    fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let since = (self.clock)().instant;
        let done = work();
        self.held.observe((self.clock)().instant.duration_since(since).as_secs_f64());
        done
    }
}
