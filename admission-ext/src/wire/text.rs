//! Strings that stay in the request body unless an escape forces a copy, and maps of which most keys are skipped.

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

/// A string of the body. `Cow` itself would allocate for every element of a container; this one borrows.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Text<'a>(pub Cow<'a, str>);

impl Deref for Text<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }
    fn visit_borrowed_str<E>(self, value: &'de str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Borrowed(value)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(value.to_owned())))
    }
    fn visit_string<E>(self, value: String) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(value)))
    }
}

/// A quantity: a string on the wire, a bare number in hand-written files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QuantityText<'a>(pub Text<'a>);

impl<'de: 'a, 'a> Deserialize<'de> for QuantityText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(QuantityVisitor).map(QuantityText)
    }
}

struct QuantityVisitor;

impl<'de> Visitor<'de> for QuantityVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quantity (string or number)")
    }
    fn visit_borrowed_str<E>(self, value: &'de str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Borrowed(value)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(value.to_owned())))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(value.to_string())))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(value.to_string())))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(value.to_string())))
    }
}

/// Which keys of a map are worth keeping.
pub trait Wanted {
    /// True for a key whose value is kept.
    fn wants(key: &str) -> bool;
}

/// The wanted entries of a JSON map, in its order; `null` is an empty map. Other values are skipped unread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picked<'a, V, W> {
    entries: Vec<(Text<'a>, V)>,
    wanted: std::marker::PhantomData<W>,
}

impl<V, W> Default for Picked<'_, V, W> {
    fn default() -> Self {
        Self { entries: Vec::new(), wanted: std::marker::PhantomData }
    }
}

impl<'a, V, W> Picked<'a, V, W> {
    /// The entries in the order of the map.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &V)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// The value under `key`.
    pub fn get(&self, key: &str) -> Option<&V> {
        self.entries.iter().find(|(at, _)| &**at == key).map(|(_, value)| value)
    }

    /// True where nothing was kept.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<'de: 'a, 'a, V: Deserialize<'de>, W: Wanted> Deserialize<'de> for Picked<'a, V, W> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_option(PickedVisitor(std::marker::PhantomData))
    }
}

struct PickedVisitor<V, W>(std::marker::PhantomData<(V, W)>);

impl<'de, V: Deserialize<'de>, W: Wanted> Visitor<'de> for PickedVisitor<V, W> {
    type Value = Picked<'de, V, W>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map or null")
    }
    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(Picked::default())
    }
    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Picked::default())
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut picked = Picked::default();
        while let Some(key) = map.next_key::<Text<'de>>()? {
            if W::wants(&key) {
                picked.entries.push((key, map.next_value()?));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(picked)
    }
}

/// Cuts the tie to the body, for objects that outlive it: those of a watch.
pub trait IntoOwned {
    /// The same without a borrow.
    type Owned: 'static;
    /// Copies what is borrowed.
    fn into_owned(self) -> Self::Owned;
}

impl IntoOwned for Text<'_> {
    type Owned = Text<'static>;
    fn into_owned(self) -> Text<'static> {
        Text(Cow::Owned(self.0.into_owned()))
    }
}

impl IntoOwned for QuantityText<'_> {
    type Owned = QuantityText<'static>;
    fn into_owned(self) -> QuantityText<'static> {
        QuantityText(self.0.into_owned())
    }
}

impl IntoOwned for i32 {
    type Owned = i32;
    fn into_owned(self) -> i32 {
        self
    }
}

impl<T: IntoOwned> IntoOwned for Option<T> {
    type Owned = Option<T::Owned>;
    fn into_owned(self) -> Self::Owned {
        self.map(T::into_owned)
    }
}

impl<T: IntoOwned> IntoOwned for Vec<T> {
    type Owned = Vec<T::Owned>;
    fn into_owned(self) -> Self::Owned {
        self.into_iter().map(T::into_owned).collect()
    }
}

impl<V: IntoOwned, W: 'static> IntoOwned for Picked<'_, V, W> {
    type Owned = Picked<'static, V::Owned, W>;
    fn into_owned(self) -> Self::Owned {
        let entries =
            self.entries.into_iter().map(|(key, value)| (key.into_owned(), value.into_owned())).collect();
        Picked { entries, wanted: std::marker::PhantomData }
    }
}

/// [`IntoOwned`] for a struct, field by field.
macro_rules! owned {
    ($view:ident { $($field:ident),* }) => {
        impl IntoOwned for $view<'_> {
            type Owned = $view<'static>;
            fn into_owned(self) -> $view<'static> {
                $view { $($field: self.$field.into_owned()),* }
            }
        }
    };
}
pub(crate) use owned;
