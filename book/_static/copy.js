// A button on each listing copies it. Code that is wrong on purpose has none: nobody should copy it.

document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return;
  for (const listing of document.querySelectorAll("div.highlight pre")) {
    if (listing.closest(".mistake")) continue;
    const button = Object.assign(document.createElement("button"), { type: "button", className: "copybtn" });
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(listing.textContent.replace(/\n$/, ""));
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 2000);
    });
    listing.parentElement.append(button);
  }
});
