//! NVIDIA's plugin reports every device as healthy after a restart. This keeps what it reported before.

use std::collections::BTreeMap;

use crate::decide::Millis;

/// How long a device stays unhealthy where no health source covers its card.
const WITHOUT_SOURCE: Millis = 10 * 60 * 1000;

/// Devices that were reported Unhealthy: in which registration, and when.
#[derive(Clone, Debug, Default)]
pub struct HealthMemory {
    unhealthy: BTreeMap<String, (u64, Millis)>,
}

impl HealthMemory {
    /// Whether a device that registration `epoch` lists as `healthy` is. `last_healthy` is when our own inventory last found its card
    /// healthy, where it is monitored.
    pub fn is_healthy(
        &mut self,
        epoch: u64,
        id: &str,
        healthy: bool,
        last_healthy: Option<Millis>,
        now: Millis,
    ) -> bool {
        if !healthy {
            // The first report counts: the plugin repeats it in every list.
            let entry = self.unhealthy.entry(id.to_owned()).or_insert((epoch, now));
            entry.0 = epoch;
            return false;
        }
        let Some((reported_in, at)) = self.unhealthy.get(id).copied() else { return true };
        let recovered = match last_healthy {
            // Within one registration only a plugin that can recover reports Healthy after Unhealthy.
            _ if reported_in == epoch => true,
            Some(healthy_at) => healthy_at > at,
            None => now.saturating_sub(at) >= WITHOUT_SOURCE,
        };
        if recovered {
            self.unhealthy.remove(id);
        }
        recovered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_of_the_plugin_makes_nothing_healthy() {
        let mut memory = HealthMemory::default();
        assert!(memory.is_healthy(1, "GPU-0", true, None, 1));
        assert!(!memory.is_healthy(1, "GPU-0", false, None, 10));
        assert!(!memory.is_healthy(2, "GPU-0", true, None, 20), "a new registration starts all healthy");
        assert!(
            !memory.is_healthy(2, "GPU-0", true, Some(5), 30),
            "the card was last healthy before it failed"
        );
        assert!(memory.is_healthy(2, "GPU-0", true, Some(25), 40), "the inventory found it healthy since");
        assert!(memory.is_healthy(2, "GPU-0", true, None, 50));
    }

    #[test]
    fn without_a_health_source_it_recovers_after_a_time() {
        let mut memory = HealthMemory::default();
        memory.is_healthy(1, "GPU-0", false, None, 0);
        assert!(!memory.is_healthy(2, "GPU-0", true, None, WITHOUT_SOURCE - 1));
        assert!(memory.is_healthy(3, "GPU-0", true, None, WITHOUT_SOURCE));
    }
}
