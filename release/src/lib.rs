//! What a release consists of, made from a folder of built programs: container images as OCI layouts, without a container
//! daemon, and the same bytes each time.
//!
//! [`oci`] writes any image, [`debian`] reads the root file system from Debian packages, [`images`] says which images there
//! are. The three JSON documents of an image are written by hand: the crate that has them as types (`oci-spec`) would bring
//! twelve more.

pub mod debian;
pub mod images;
pub mod oci;
