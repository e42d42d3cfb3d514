//! `ListAndWatchResponse` with its thousands of devices in one allocation.

use prost::bytes::Bytes;
use prost::{DecodeError, Message};

use crate::deviceplugin::{Device, NumaNode, TopologyInfo};

/// `ListAndWatchResponse` of the protocol, each device as its bytes.
///
/// On the wire a message within a message is its length and its bytes, as `bytes` are. So thousands of devices are one piece of
/// memory and not two strings each.
#[derive(Clone, PartialEq, Message)]
pub struct ListAndWatchResponse {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    devices: Vec<Bytes>,
}

impl ListAndWatchResponse {
    /// The devices in it.
    ///
    /// # Errors
    /// One of them is not a `Device`.
    pub fn devices(&self) -> Result<Vec<Device>, DecodeError> {
        self.devices.iter().map(|device| Device::decode(device.clone())).collect()
    }
}

impl FromIterator<Device> for ListAndWatchResponse {
    fn from_iter<I: IntoIterator<Item = Device>>(devices: I) -> Self {
        Self { devices: devices.into_iter().map(|device| device.encode_to_vec().into()).collect() }
    }
}

/// Makes a list, device by device.
#[derive(Debug, Default)]
pub struct ListWriter {
    device: Device,
    written: Vec<u8>,
    ends: Vec<usize>,
}

impl ListWriter {
    pub fn add(&mut self, id: &str, health: &str, numa: &[i64]) {
        let Device { id: of_device, health: its_health, topology } = &mut self.device;
        of_device.clear();
        of_device.push_str(id);
        its_health.clear();
        its_health.push_str(health);
        *topology = (!numa.is_empty())
            .then(|| TopologyInfo { nodes: numa.iter().map(|id| NumaNode { id: *id }).collect() });
        // A vector grows as it is written.
        let _ = self.device.encode(&mut self.written);
        self.ends.push(self.written.len());
    }

    #[must_use]
    pub fn finish(self) -> ListAndWatchResponse {
        let written = Bytes::from(self.written);
        let mut begin = 0;
        let device = |end| written.slice(std::mem::replace(&mut begin, end)..end);
        ListAndWatchResponse { devices: self.ends.into_iter().map(device).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_the_bytes_of_the_protocol() {
        // Two times field 1, of 20 and 16 bytes; in each an ID and a health, in the first also the NUMA node 1.
        let near: &[u8] = b"\x0a\x14\x0a\x03c-0\x12\x07Healthy\x1a\x04\x0a\x02\x08\x01";
        let wire = [near, b"\x0a\x10\x0a\x03c-1\x12\x09Unhealthy"].concat();
        let mut writer = ListWriter::default();
        writer.add("c-0", "Healthy", &[1]);
        writer.add("c-1", "Unhealthy", &[]);
        let list = writer.finish();
        assert_eq!(list.encode_to_vec(), wire);
        let devices = ListAndWatchResponse::decode(wire.as_slice()).unwrap().devices().unwrap();
        assert_eq!(devices.iter().cloned().collect::<ListAndWatchResponse>(), list);
        let numa = devices[0].topology.as_ref().map(|topology| topology.nodes.len());
        assert_eq!((devices[0].id.as_str(), numa), ("c-0", Some(1)));
        assert_eq!((devices[1].health.as_str(), devices[1].topology.is_none()), ("Unhealthy", true));
    }

    #[test]
    fn a_malformed_device_is_refused() {
        let list = ListAndWatchResponse::decode(b"\x0a\x02\x0a\x09".as_slice()).unwrap();
        assert!(list.devices().is_err());
    }
}
