//! Objects in protobuf, as kubectl's typed commands send them: of a Namespace what `kubectl create namespace` writes, and the name
//! of the kind of everything else, which is refused by it.

use std::collections::HashMap;

use prost::Message;
use serde_json::{Value, json};

use super::status::Refusal;

/// What comes before the envelope (`k8s.io/apimachinery/pkg/runtime/serializer/protobuf`).
const MAGIC: &[u8] = b"k8s\0";

/// `k8s.io.apimachinery.pkg.runtime.Unknown`.
#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(message, optional, tag = "1")]
    type_meta: Option<TypeMeta>,
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct TypeMeta {
    #[prost(string, tag = "1")]
    api_version: String,
    #[prost(string, tag = "2")]
    kind: String,
}

/// The part of an object that all kinds have.
#[derive(Clone, PartialEq, Message)]
struct Object {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ObjectMeta>,
}

/// The part of `k8s.io.apimachinery.pkg.apis.meta.v1.ObjectMeta` that an author writes.
#[derive(Clone, PartialEq, Message)]
struct ObjectMeta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(map = "string, string", tag = "11")]
    labels: HashMap<String, String>,
    #[prost(map = "string, string", tag = "12")]
    annotations: HashMap<String, String>,
}

/// Reads a Namespace.
///
/// # Errors
/// 415 for every other kind, 400 for what is no object at all.
pub fn read(bytes: &[u8]) -> Result<Value, Refusal> {
    let envelope = bytes.strip_prefix(MAGIC).ok_or_else(|| Refusal::bad_request("no object in protobuf"))?;
    let broken = |error: prost::DecodeError| Refusal::bad_request(format!("protobuf: {error}"));
    let envelope = Envelope::decode(envelope).map_err(broken)?;
    let kind = envelope.type_meta.unwrap_or_default();
    if (kind.api_version.as_str(), kind.kind.as_str()) != ("v1", "Namespace") {
        return Err(Refusal::media_type(format!(
            "the embedded API server does not read the kind {} in protobuf, as this command sends it: use kubectl apply, delete or patch",
            kind.kind
        )));
    }
    let metadata = Object::decode(&*envelope.raw).map_err(broken)?.metadata.unwrap_or_default();
    let mut object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": metadata.name}});
    for (key, map) in [("labels", metadata.labels), ("annotations", metadata.annotations)] {
        if !map.is_empty() {
            object["metadata"][key] = json!(map);
        }
    }
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(kind: &str) -> Vec<u8> {
        let metadata = ObjectMeta {
            name: "team".into(),
            labels: [("a".into(), "1".into())].into(),
            ..Default::default()
        };
        let raw = Object { metadata: Some(metadata) }.encode_to_vec();
        let type_meta = TypeMeta { api_version: "v1".into(), kind: kind.into() };
        [MAGIC, &Envelope { type_meta: Some(type_meta), raw }.encode_to_vec()].concat()
    }

    #[test]
    fn a_namespace_is_read_and_nothing_else() {
        let expected = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team", "labels": {"a": "1"}}});
        assert_eq!(read(&sent("Namespace")).unwrap(), expected);
        let refusal = read(&sent("Eviction")).unwrap_err();
        assert_eq!(refusal.code.as_u16(), 415);
        assert!(refusal.message.contains("Eviction in protobuf"), "{}", refusal.message);
        assert!(refusal.message.ends_with("use kubectl apply, delete or patch"), "{}", refusal.message);
        for broken in [&b"k8s"[..], b"k8s\0\xff", b""] {
            assert_eq!(read(broken).unwrap_err().code.as_u16(), 400, "{broken:?}");
        }
    }
}
