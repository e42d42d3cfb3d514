//! What NVIDIA's plugin said about a device, remembered across its restarts.

use std::collections::BTreeMap;

use crate::decide::Millis;

/// How long a device stays sick that nobody can vouch for.
const UNVOUCHED: Millis = 10 * 60 * 1000;

/// Devices that were called Unhealthy once, in which registration, and when.
#[derive(Clone, Debug, Default)]
pub struct HealthMemory {
    sick: BTreeMap<String, (u64, Millis)>,
}

impl HealthMemory {
    /// Whether a device that is listed as `healthy` in registration `epoch` is to be believed so.
    ///
    /// `vouched` says when our own inventory last found its card well, if it can tell.
    pub fn judge(
        &mut self,
        epoch: u64,
        id: &str,
        healthy: bool,
        vouched: Option<Millis>,
        now: Millis,
    ) -> bool {
        if !healthy {
            // The first report counts: the plugin repeats it in every list.
            let entry = self.sick.entry(id.to_owned()).or_insert((epoch, now));
            entry.0 = epoch;
            return false;
        }
        let Some((said_in, at)) = self.sick.get(id).copied() else { return true };
        let believed = match vouched {
            // The same registration says healthy after Unhealthy only if the plugin has learnt to recover.
            _ if said_in == epoch => true,
            Some(vouched) => vouched > at,
            None => now.saturating_sub(at) >= UNVOUCHED,
        };
        if believed {
            self.sick.remove(id);
        }
        believed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_of_the_plugin_heals_nothing() {
        let mut memory = HealthMemory::default();
        assert!(memory.judge(1, "GPU-0", true, None, 1));
        assert!(!memory.judge(1, "GPU-0", false, None, 10));
        assert!(!memory.judge(2, "GPU-0", true, None, 20), "a new registration starts all healthy");
        assert!(!memory.judge(2, "GPU-0", true, Some(5), 30), "the card was last seen well before it failed");
        assert!(memory.judge(2, "GPU-0", true, Some(25), 40), "the inventory vouches for it");
        assert!(memory.judge(2, "GPU-0", true, None, 50));
    }

    #[test]
    fn without_anyone_to_vouch_time_heals() {
        let mut memory = HealthMemory::default();
        memory.judge(1, "GPU-0", false, None, 0);
        assert!(!memory.judge(2, "GPU-0", true, None, UNVOUCHED - 1));
        assert!(memory.judge(3, "GPU-0", true, None, UNVOUCHED));
    }
}
