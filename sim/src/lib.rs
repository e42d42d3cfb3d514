//! Stand-ins for what surrounds the components, for tests and the demo. They know none of our components.

pub mod cluster;
