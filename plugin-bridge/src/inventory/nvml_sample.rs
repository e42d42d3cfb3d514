//! What NVML says of a card's use. Called where [`super::nvml`] is.

use std::collections::BTreeMap;
use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::{ProcessInfo, ProcessUtilizationSample};

use crate::usage::{CardSample, ProcessSample, owner};

/// The name of MPS' server and of its control daemon, of which the kernel keeps 15 characters.
const MPS: &str = "nvidia-cuda-mps";

/// The processes that compute on the card, where NVML says so: with MPS its clients, and not its server, which has every card and
/// outlives them.
pub(super) fn computing(device: &Device<'_>) -> Option<Vec<ProcessInfo>> {
    let mut all = device.running_compute_processes().ok()?;
    all.retain(|process| !is_mps(Path::new("/proc"), process.pid));
    all.extend(device.mps_running_compute_processes().unwrap_or_default());
    Some(all)
}

fn is_mps(proc: &Path, pid: u32) -> bool {
    std::fs::read_to_string(proc.join(pid.to_string()).join("comm")).is_ok_and(|name| name.trim_end() == MPS)
}

/// Samples cards, each time since the time before.
pub(super) struct Sampler {
    /// NVML's time of the newest sample of each card's processes, in microseconds.
    since: BTreeMap<String, u64>,
    /// NVML lists the processes that its caller's PID namespace has. In a container with a namespace of its own the agent is process 1.
    sees_processes: bool,
}

impl Sampler {
    pub(super) fn new() -> Self {
        let sees_processes = std::os::unix::process::parent_id() != 1;
        Self { since: BTreeMap::new(), sees_processes }
    }

    /// `computing`: the processes that compute on the card, where NVML says so.
    pub(super) fn sample(
        &mut self,
        uuid: &str,
        device: &Device<'_>,
        computing: Option<&[ProcessInfo]>,
    ) -> CardSample {
        let processes = computing.filter(|_| self.sees_processes).map(|computing| {
            let since = self.since.entry(uuid.to_owned()).or_default();
            let graphics = device.running_graphics_processes().unwrap_or_default();
            let utilization = match device.process_utilization_stats(*since) {
                Ok(samples) => Some(newest(samples)),
                // Nothing ran since.
                Err(NvmlError::NotFound) => Some(BTreeMap::new()),
                Err(_) => None,
            };
            let times = utilization.iter().flat_map(BTreeMap::values).map(|sample| sample.timestamp);
            *since = times.fold(*since, u64::max);
            of_processes(computing.iter().chain(&graphics), utilization.as_ref())
        });
        CardSample {
            utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
            memory_used_bytes: device.memory_info().ok().map(|memory| memory.used),
            power_milliwatts: device.power_usage().ok(),
            temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            processes,
        }
    }
}

/// The latest sample of each process; NVML also has impossible ones.
fn newest(samples: Vec<ProcessUtilizationSample>) -> BTreeMap<u32, ProcessUtilizationSample> {
    let mut newest: BTreeMap<u32, ProcessUtilizationSample> = BTreeMap::new();
    for sample in samples.into_iter().filter(|sample| sample.sm_util <= 100) {
        let known = newest.get(&sample.pid);
        if known.is_none_or(|known| known.timestamp <= sample.timestamp) {
            newest.insert(sample.pid, sample);
        }
    }
    newest
}

/// One for each process, which NVML may list in several ways.
fn of_processes<'p>(
    all: impl Iterator<Item = &'p ProcessInfo>,
    utilization: Option<&BTreeMap<u32, ProcessUtilizationSample>>,
) -> Vec<ProcessSample> {
    let mut found: BTreeMap<u32, ProcessSample> = BTreeMap::new();
    for process in all {
        let sample = found.entry(process.pid).or_insert_with(|| ProcessSample {
            pid: process.pid,
            owner: owner::of_process(Path::new("/proc"), process.pid),
            memory_bytes: None,
            utilization_percent: utilization
                .map(|by_pid| by_pid.get(&process.pid).map_or(0, |one| one.sm_util)),
        });
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
            sample.memory_bytes = sample.memory_bytes.max(Some(bytes));
        }
    }
    found.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, memory: u64) -> ProcessInfo {
        let used_gpu_memory = UsedGpuMemory::Used(memory);
        ProcessInfo { pid, used_gpu_memory, gpu_instance_id: None, compute_instance_id: None }
    }

    fn utilization(pid: u32, timestamp: u64, sm_util: u32) -> ProcessUtilizationSample {
        ProcessUtilizationSample { pid, timestamp, sm_util, mem_util: 0, enc_util: 0, dec_util: 0 }
    }

    #[test]
    fn a_process_counts_once_and_with_its_latest_possible_utilization() {
        let by_pid = newest(vec![
            utilization(u32::MAX, 3, 20),
            utilization(u32::MAX, 4, 30),
            utilization(u32::MAX, 5, 4_000_000),
            utilization(u32::MAX, 2, 10),
        ]);
        let listed = [process(u32::MAX, 7), process(u32::MAX, 9)];
        let none = BTreeMap::new();
        let of = |utilization| of_processes(listed.iter(), utilization);
        let [known] = &of(Some(&by_pid))[..] else { panic!("{by_pid:?}") };
        assert_eq!((known.memory_bytes, known.utilization_percent), (Some(9), Some(30)));
        assert_eq!(of(Some(&none))[0].utilization_percent, Some(0), "it did not run");
        assert_eq!(of(None)[0].utilization_percent, None);
    }

    #[test]
    fn a_server_of_mps_is_known_by_its_name() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, name) in [("7", "nvidia-cuda-mps\n"), ("8", "python3\n")] {
            std::fs::create_dir(proc.path().join(pid)).unwrap();
            std::fs::write(proc.path().join(pid).join("comm"), name).unwrap();
        }
        assert!(is_mps(proc.path(), 7) && !is_mps(proc.path(), 8) && !is_mps(proc.path(), 9));
    }
}
