//! The two files that gpu-manager's vcuda-controller reads, byte by byte (`include/hijack.h`, x86-64).

/// `vcuda.config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcudaConfig {
    /// UID of the pod, at most 47 bytes.
    pub pod_uid: String,
    /// Soft limit of cores; 0: none.
    pub limit: i32,
    pub container: String,
    /// PCI address of the card, at most 15 bytes: see `short_bus_id`.
    pub bus_id: String,
    pub memory: u64,
    pub cores: i32,
    pub hard: bool,
    pub driver: (u32, u32),
    /// Whether anything is limited: not on whole cards.
    pub enable: bool,
}

/// Size of the C structure.
const SIZE: usize = 8240;

impl VcudaConfig {
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut file = vec![0_u8; SIZE];
        put_text(&mut file, 0, 48, &self.pod_uid);
        put(&mut file, 48, &self.limit.to_ne_bytes());
        put_text(&mut file, 4096, 4096, &self.container);
        put_text(&mut file, 8192, 16, &self.bus_id);
        put(&mut file, 8208, &self.memory.to_ne_bytes());
        put(&mut file, 8216, &self.cores.to_ne_bytes());
        put(&mut file, 8220, &i32::from(self.hard).to_ne_bytes());
        put(&mut file, 8224, &self.driver.0.to_ne_bytes());
        put(&mut file, 8228, &self.driver.1.to_ne_bytes());
        put(&mut file, 8232, &i32::from(self.enable).to_ne_bytes());
        file
    }
}

/// A PCI address with four digits of domain, as in the first form of `nvmlPciInfo_t`, which the controller reads: NVML now writes
/// eight, which its 16 bytes do not hold.
#[must_use]
pub(super) fn short_bus_id(bus_id: &str) -> &str {
    match bus_id.split_once(':') {
        Some((domain, _)) if domain.len() == 8 => bus_id.get(4..).unwrap_or(bus_id),
        _ => bus_id,
    }
}

/// `pids.config`: the container's processes, an array of C ints.
#[must_use]
pub fn pids_config(pids: &[i32]) -> Vec<u8> {
    pids.iter().flat_map(|pid| pid.to_ne_bytes()).collect()
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = file.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Text that does not fit is cut, so that its terminating zero stays.
fn put_text(file: &mut [u8], at: usize, size: usize, text: &str) {
    let bytes = text.as_bytes();
    put(file, at, &bytes[..bytes.len().min(size - 1)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_lies_where_the_c_structure_has_it() {
        let config = VcudaConfig {
            pod_uid: "uid".into(),
            limit: 7,
            container: "main".into(),
            bus_id: "0000:65:00.0".into(),
            memory: 1 << 33,
            cores: 30,
            hard: true,
            driver: (550, 1),
            enable: true,
        };
        let file = config.bytes();
        assert_eq!(file.len(), 8240);
        assert_eq!(&file[..4], b"uid\0");
        assert_eq!(file[48], 7);
        assert_eq!(&file[4096..4101], b"main\0");
        assert_eq!(&file[8192..8205], b"0000:65:00.0\0");
        assert_eq!(u64::from_ne_bytes(file[8208..8216].try_into().unwrap()), 1 << 33);
        let ints: Vec<i32> =
            file[8216..8236].chunks(4).map(|b| i32::from_ne_bytes(b.try_into().unwrap())).collect();
        assert_eq!(ints, [30, 1, 550, 1, 1]);
        let long = VcudaConfig { pod_uid: "x".repeat(60), ..config };
        assert_eq!(long.bytes()[47], 0, "a text that is too long still ends");
    }

    #[test]
    fn an_address_is_written_whole() {
        for (of_nvml, expected) in [
            ("00000000:65:00.0", "0000:65:00.0"),
            ("00000001:C1:00.0", "0001:C1:00.0"),
            ("0000:65:00.0", "0000:65:00.0"),
            ("", ""),
        ] {
            assert_eq!(short_bus_id(of_nvml), expected);
        }
    }

    #[test]
    fn processes_are_c_ints() {
        assert_eq!(pids_config(&[1, 258]).len(), 8);
    }
}
